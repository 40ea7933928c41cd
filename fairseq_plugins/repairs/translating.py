"""Repairs of translation: loading models, options of a search, repeated n-grams, unknown words, and blank lines."""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
from collections.abc import Callable
from itertools import compress
from typing import Any

import torch
from fairseq import checkpoint_utils, utils
from fairseq.file_io import PathManager
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY, BaseFairseqModel
from fairseq.modules.transformer_layer import TransformerEncoderLayerBase
from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.sequence_scorer import SequenceScorer
from fairseq.tasks import FairseqTask
from fairseq.tasks.translation import TranslationTask
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fairseq_plugins.common.model import TranslationModel
from fairseq_plugins.common.options import architecture
from fairseq_plugins.repairs.refusals import refuse
from fairseq_plugins.repairs.resuming import sides_of_other_words
from fairseq_plugins.repairs.wrapping import repair, wrap
from fairseq_plugins.vocabulary.unknown_words import keep_source_words, read_translations, replace_unknown_words

# Initialisers that `Unfilled` skips.  The other random initialisers call Tensor.normal_ or Tensor.uniform_.
_FILL = {Tensor.normal_, Tensor.uniform_, nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_}


class Unfilled(TorchFunctionMode):
    """A context that leaves new parameters uninitialised, because a checkpoint's parameters replace them later."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FILL:
            tensor = kwargs["tensor"] if "tensor" in kwargs else args[0]
            if tensor.requires_grad:  # a parameter, or a view of a part of a parameter
                return tensor
        return func(*args, **kwargs)


@wrap(checkpoint_utils, "load_model_ensemble_and_task")
def load_models(load: Any, *args: Any, **kwargs: Any) -> Any:
    """Load models without reading embedding files or initialising parameters; refuse changed dictionaries.

    - Pretrained embedding files are not read, because the checkpoint has the embeddings and the files may be gone.
    - Parameters of this plugin's models are not initialised, because a checkpoint has all of them; this saves 0.7 s for
      137 million parameters.  Random numbers drawn later, for example by ``--sampling``, therefore differ from plain
      fairseq's.
    - Errors name the checkpoint file if sizes differ, or if the architecture is not registered.
    - A dictionary of the same size with other words is refused; fairseq would produce nonsense with this dictionary.
    """
    bound = inspect.signature(load).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    no_files = dict.fromkeys(("encoder_embed_path", "decoder_embed_path"))
    given["arg_overrides"] = {**no_files, **(given["arg_overrides"] or {})}
    ensemble, cfg = [], None
    # Files are loaded one by one, so that each file is read once and errors name the file.
    for filename in given["filenames"]:
        models, cfg, given["task"] = load_one(load, filename, given)
        ensemble += models
    return ensemble, cfg, given["task"]


def load_one(load: Any, filename: str, given: dict[str, Any]) -> Any:
    """Return the models, the configuration and the task of a checkpoint file; errors name the file."""
    path = checkpoint_utils.get_maybe_sharded_checkpoint_filename(filename, given["suffix"], 0, given["num_shards"])
    state = given["state"]
    if state is None and PathManager.exists(path):  # fairseq itself reports a missing file
        state = checkpoint_utils.load_checkpoint_to_cpu(path, given["arg_overrides"])
    try:
        with Unfilled() if given["strict"] and is_ours(state) else contextlib.nullcontext():
            models, cfg, task = load(**{**given, "filenames": [filename], "state": state})
    except (KeyError, AssertionError):  # fairseq's error message for an unregistered model raises a KeyError
        name = architecture(state["cfg"].model)
        if name in MODEL_DATACLASS_REGISTRY or name in ARCH_MODEL_REGISTRY:
            raise
        raise ValueError(
            f"{filename}: the architecture {name} is not registered; give the --user-dir of its training"
        ) from None
    except RuntimeError as error:
        if "state_dict" not in str(error) or str(filename) in str(error):
            raise
        reason = " ".join(str(error).partition(":")[2].split())[:160]
        raise ValueError(
            f"{filename}: the vocabulary or the architecture differs from the checkpoint's ({reason}); give the "
            "data folder (--data) of its training"
        ) from None
    if sides := sides_of_other_words(task, (state or {}).get("extra_state")):
        raise ValueError(
            f"{filename}: the checkpoint's {sides[0]} dictionary differs from that of the data; use data prepared "
            "with the dictionaries of the checkpoint's training"
        )
    return models, cfg, task


def is_ours(state: dict[str, Any] | None) -> bool:
    """Return whether a checkpoint has a model of this plugin; such a checkpoint has all parameters of the model."""
    name = architecture(state["cfg"].model) if state and state["cfg"] else None
    return issubclass(ARCH_MODEL_REGISTRY.get(name, MODEL_REGISTRY.get(name, object)), TranslationModel)


@repair
def use_no_fused_encoder_layer() -> None:
    """Disable torch's fused encoder layer in fairseq 0.12.2; torch 2 rejects this version's calls."""
    TransformerEncoderLayerBase.can_use_fastpath = property(lambda _: False, lambda _, __: None)


@wrap(BaseFairseqModel, "prepare_for_inference_")
def report_attention(prepare: Any, self: Any, cfg: Any) -> None:
    """Make models report attention for ``--replace-unk``, as they do for ``--print-alignment``."""
    if getattr(cfg.generation, "replace_unk", None) is not None and not cfg.generation.print_alignment:
        cfg = copy.deepcopy(cfg)
        cfg.generation.print_alignment = "hard"
    prepare(self, cfg)


@wrap(utils, "post_process_prediction")
def replace_unknown_words_by_attention(post_process: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace each unknown word by the source word with the most attention (``--replace-unk``).

    fairseq crashes at an unknown word, and ``fairseq-interactive`` does not keep the unknown words of the source.
    """
    given = inspect.signature(post_process).bind(*args, **kwargs).arguments
    translations, tgt_dict = given["align_dict"], given["tgt_dict"]
    tokens, text, alignment = post_process(**{**given, "align_dict": None})
    if translations is None:
        return tokens, text, alignment
    text = replace_unknown_words(tokens, text, alignment, given["src_str"], translations, tgt_dict)
    # fairseq would add the words to the dictionary, as if the model knew them.
    return tgt_dict.encode_line(text, add_if_not_exist=False), text, alignment


@wrap(utils, "load_align_dict")
def read_dictionary_of_unknown_words(_: Any, replace_unk: str | None) -> dict[str, str] | None:
    """Refuse malformed lines in the file of ``--replace-unk``, and name the line; fairseq raises an IndexError."""
    return read_translations(replace_unk)


@wrap(NGramRepeatBlock, "_no_repeat_ngram")
def block_repeated_ngrams(
    find: Any, self: Any, tokens: Tensor, lprobs: Tensor, bsz: int, beam_size: int, step: int
) -> Any:
    """Apply ``--no-repeat-ngram-size`` to the tokens of a hypothesis, not to the padding after the tokens.

    fairseq pads each hypothesis to the maximum length.  Without its CUDA extension, fairseq mistakes the padding after
    a hypothesis for the hypothesis's last words, and compares the padding with earlier n-grams.
    """
    return find(self, tokens[:, : step + 1], lprobs, bsz, beam_size, step)


@wrap(FairseqTask, "build_generator")
def build_generators(build: Any, self: Any, models: Any, args: Any, *more: Any, **others: Any) -> Any:
    """Check the options of a search, and keep the source words for ``--replace-unk``."""
    words = self.target_dictionary and {"words": len(self.target_dictionary)}
    cfg = getattr(self, "cfg", None)
    refuse("task.build_generator", cfg, args, words)
    generator = build(self, models, args, *more, **others)
    # With --score-reference, the generator only scores given translations, and does not replace words.
    if getattr(args, "replace_unk", None) is not None and not getattr(args, "score_reference", False):
        keep_source_words(self, generator, getattr(cfg, "attention_offset", 0))
    return generator


@wrap(TranslationTask, "inference_step")
def leave_blank_lines_blank(
    step: Any, self: Any, generator: Any, models: Any, sample: Any, prefix_tokens: Any = None, constraints: Any = None
) -> Any:
    """Translate a blank line to a blank line, like an exported model, unless a prefix or constraint forces words.

    A model that was trained without blank lines invents a word for a blank line.  Sentencepiece pieces of white space
    do not count as words.
    """
    found = step(self, generator, models, sample, prefix_tokens, constraints)
    if prefix_tokens is None and not isinstance(generator, SequenceScorer):
        pad, rows = self.source_dictionary.pad(), sample["net_input"]["src_tokens"].tolist()
        sources = ([self.source_dictionary[token] for token in row if token != pad] for row in rows)
        blank = torch.tensor([is_blank(words[:-1]) for words in sources])  # without the end-of-sentence token
        if constraints is not None:
            blank &= constraints[:, 0].eq(0).cpu()  # the first entry is the number of constraints
        for hypotheses in compress(found, blank.tolist()):
            for hypothesis in hypotheses:
                remove_words(hypothesis, self.target_dictionary.eos())
    return found


def is_blank(words: list[str]) -> bool:
    """Return whether a source has no words.

    White space is not a word, whether sentencepiece encodes it as pieces (U+2581) or as byte tokens (``<0x0A>``).
    """
    text = bytearray()
    for word in words:
        if byte := re.fullmatch("<0x([0-9A-F]{2})>", word):
            text.append(int(byte[1], 16))
        elif word.strip("\u2581"):
            return False
    return not text.decode(errors="replace").strip()


def remove_words(hypothesis: dict[str, Any], eos: int) -> None:
    """Remove all words of a hypothesis; the end-of-sentence token remains, with score 0."""
    attention, alignment = hypothesis.get("attention"), hypothesis.get("alignment")
    hypothesis["tokens"] = hypothesis["tokens"].new_tensor([eos])
    hypothesis["score"] = torch.zeros(())
    hypothesis["positional_scores"] = hypothesis["positional_scores"].new_zeros(1)
    if isinstance(attention, Tensor) and attention.dim() == 2:  # (source tokens, target tokens)
        hypothesis["attention"] = attention[:, :1]
    if isinstance(alignment, list):
        del alignment[1:]
