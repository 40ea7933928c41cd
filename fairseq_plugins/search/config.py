"""Options of the task `translation_fast`."""

from dataclasses import dataclass, field
from typing import Optional

from fairseq.dataclass import ChoiceEnum
from fairseq.tasks.translation import TranslationConfig

from fairseq_plugins.cpu.products import PRECISIONS


@dataclass
class TranslationFastConfig(TranslationConfig):
    candidates: Optional[str] = field(
        default=None,
        metadata={
            "help": "predict only the candidate words of each batch: folder made by `fairseq-plugins lexicon`, with "
            "candidates.txt and frequent.txt (default: the whole vocabulary)"
        },
    )
    candidates_per_word: int = field(
        default=20,
        metadata={"help": "with --candidates: number of translations of each source word that are candidates"},
    )
    frequent_candidates: int = field(
        default=1000,
        metadata={"help": "with --candidates: number of the most frequent words that are always candidates"},
    )
    cpu_dtype: ChoiceEnum(list(PRECISIONS)) = field(  # type: ignore[valid-type]
        default="float32",
        metadata={
            "help": "precision of products with weights when this plugin's models translate on a CPU; float32 if the "
            "CPU does not support it; in int8, all inputs of a product share one step size"
        },
    )
    compile_steps: bool = field(
        default=False,
        metadata={
            "help": "compile the decoding steps of this plugin's models with torch.compile, on a GPU into CUDA graphs; "
            "the first batch of each size is slow"
        },
    )
    word_penalty: float = field(
        default=0.0,
        metadata={
            "help": "number added to the log-probability of each word except the end of the sentence, in nats; above "
            "zero, translations are longer; tune it with `fairseq-plugins tune-length --word-penalties`"
        },
    )
    attention_offset: int = field(
        default=0,
        metadata={
            "help": "with --replace-unk: distance in words from the most attended source word to the source word that "
            "replaces an unknown word"
        },
    )
