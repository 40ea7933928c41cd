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
            "help": "predict only words that a batch may need: the folder made by `fairseq-plugins lexicon`, with "
            "candidates.txt and frequent.txt (default: the whole vocabulary)"
        },
    )
    candidates_per_word: int = field(
        default=20, metadata={"help": "with --candidates: how many translations of each source word are candidates"}
    )
    frequent_candidates: int = field(
        default=1000, metadata={"help": "with --candidates: how many of the most frequent words are always candidates"}
    )
    cpu_dtype: ChoiceEnum(list(PRECISIONS)) = field(  # type: ignore[valid-type]
        default="float32",
        metadata={
            "help": "translating on a processor, precision of products with the weights of this plugin's models; where "
            "the processor has no instructions for it, float32; in int8 a batch shares its rounding of inputs"
        },
    )
    compile_steps: bool = field(
        default=False,
        metadata={
            "help": "compile the decoding steps of this plugin's models (torch.compile), on a GPU into CUDA graphs; "
            "the first batch of each size then takes long"
        },
    )
    word_penalty: float = field(
        default=0.0,
        metadata={
            "help": "added to the log-probability of each word but the end, in nats: above zero for longer "
            "translations; `fairseq-plugins tune-length --word-penalties` finds a good one"
        },
    )
    attention_offset: int = field(
        default=0,
        metadata={
            "help": "with --replace-unk: replace an unknown word by the one so many words behind the source word that "
            "it attends to most"
        },
    )
