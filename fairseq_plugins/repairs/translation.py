"""What fairseq does when it translates."""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import re
from collections.abc import Callable
from itertools import compress
from types import SimpleNamespace
from typing import Any

import torch
from fairseq import checkpoint_utils, utils
from fairseq.data import Dictionary
from fairseq.file_io import PathManager
from fairseq.models import (
    ARCH_MODEL_REGISTRY,
    MODEL_DATACLASS_REGISTRY,
    MODEL_REGISTRY,
    BaseFairseqModel,
    FairseqMultiModel,
)
from fairseq.modules.transformer_layer import TransformerEncoderLayerBase
from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.sequence_scorer import SequenceScorer
from fairseq.tasks import FairseqTask
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from omegaconf import OmegaConf
from torch import Tensor

from fairseq_plugins.common.model import TranslationModel
from fairseq_plugins.common.options import architecture
from fairseq_plugins.repairs.records import sides_of_other_words
from fairseq_plugins.repairs.refusals import refuse
from fairseq_plugins.repairs.unfilled import Unfilled
from fairseq_plugins.repairs.wrapping import in_place_of
from fairseq_plugins.vocabulary.unknown_words import keep_source_words, read_translations, replace_unknown_words


def wants_embedding_files(load: Callable[..., Any]) -> bool:
    """Probe: whether a model that ``load`` builds is told to read the embeddings that its training began with."""
    paths = []

    def build_model(cfg: Any) -> Any:
        paths.append(cfg.get("encoder_embed_path"))
        return SimpleNamespace(load_state_dict=lambda *_, **__: None)

    cfg = OmegaConf.create({"model": {"encoder_embed_path": "words"}})
    load([__file__], task=SimpleNamespace(build_model=build_model), state={"cfg": cfg, "model": {}})
    return any(paths)


def load_models() -> None:
    """One wrapper of what translates, for six things.

    fairseq reads pretrained embeddings again, which the checkpoint holds, and fails where their file is gone.  It draws
    random numbers for all parameters, and then loads the checkpoint over them: this plugin's models are spared that,
    where the checkpoint has to hold every parameter.  With data of another vocabulary it does not say which model has
    other sizes, and of a model that nobody has registered nothing at all; there the probe comes with the error.  And
    where the sizes are the same it translates nonsense: a checkpoint that knows its words is compared with the data,
    file by file, so that none is read twice.  Last, `take_positions`.
    """
    load = checkpoint_utils.load_model_ensemble_and_task
    no_files = dict.fromkeys(("encoder_embed_path", "decoder_embed_path")) if wants_embedding_files(load) else {}
    signature = inspect.signature(load)

    def load_one(filename: str, given: dict[str, Any]) -> Any:
        path = checkpoint_utils.get_maybe_sharded_checkpoint_filename(filename, given["suffix"], 0, given["num_shards"])
        state = given["state"]
        if state is None and PathManager.exists(path):  # otherwise fairseq says so
            state = checkpoint_utils.load_checkpoint_to_cpu(path, given["arg_overrides"])
        try:
            with Unfilled() if given["strict"] and is_ours(state) else contextlib.nullcontext():
                models, cfg, task = load(**{**given, "filenames": [filename], "state": state})
        except (KeyError, AssertionError):  # of fairseq's sentence on such a model, which also fails to be written
            name = architecture(state["cfg"].model)
            if name in MODEL_DATACLASS_REGISTRY or name in ARCH_MODEL_REGISTRY:
                raise
            raise ValueError(
                f"{filename} holds a model of the architecture {name}, which nothing here registers: it wants the "
                "--user-dir of its training"
            ) from None
        except RuntimeError as error:
            if "state_dict" not in str(error) or str(filename) in str(error):
                raise
            raise RuntimeError(f"{filename}: not of the vocabulary or the architecture asked for. {error}") from None
        # A model of several pairs of languages has a dictionary of each, and its task another one in training.
        extra_state = (state or {}).get("extra_state")
        if not isinstance(models[0], FairseqMultiModel) and (sides := sides_of_other_words(task, extra_state)):
            raise ValueError(
                f"{filename} was trained with other {sides[0]} words than those of this data, and would make "
                "nonsense of them; it wants data with the dictionaries of its training"
            )
        take_positions(task, state["cfg"].task if state else None)
        return models, cfg, task

    @in_place_of(checkpoint_utils, "load_model_ensemble_and_task")
    def load_model_ensemble_and_task(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        given["arg_overrides"] = {**no_files, **(given["arg_overrides"] or {})}
        ensemble, cfg = [], None
        for filename in given["filenames"]:
            models, cfg, given["task"] = load_one(filename, given)
            ensemble += models
        return ensemble, cfg, given["task"]


def is_ours(state: dict[str, Any] | None) -> bool:
    """Whether a checkpoint holds a model of this plugin, which takes no parameter but from its checkpoint."""
    name = architecture(state["cfg"].model) if state and state["cfg"] else None
    return issubclass(ARCH_MODEL_REGISTRY.get(name, MODEL_REGISTRY.get(name, object)), TranslationModel)


def take_positions(task: Any, trained: Any) -> None:
    """Read sentences as long as the training's, where the command leaves the limits at their defaults.

    fairseq's programs take them for limits of the user, and cut or refuse what the model could translate.
    """
    for option in ("max_source_positions", "max_target_positions"):
        limit, longest = (getattr(cfg, option, None) for cfg in (getattr(task, "cfg", None), trained))
        if limit == getattr(TranslationConfig, option) and isinstance(longest, int) and longest > limit:
            task.cfg[option] = longest


def use_no_fused_encoder_layer() -> None:
    """fairseq 0.12.2's transformers decode with torch's fused encoder layer, in a form which torch 2 no longer takes.

    ("Mask Type should be defined".) They take their ordinary way, as later ones do.
    """
    if "can_use_fastpath" in TransformerEncoderLayerBase.__init__.__code__.co_names:
        TransformerEncoderLayerBase.can_use_fastpath = property(lambda _: False, lambda _, __: None)


def blocks_within_a_longer_buffer(size: int) -> bool:
    """Probe: whether ``5 6 5``, with places for more tokens behind it, forbids a second 6."""
    block = NGramRepeatBlock(size, use_extension=False)
    scores = block(torch.tensor([[5, 6, 5, 1, 1]]), torch.zeros(1, 8), bsz=1, beam_size=1, step=2)
    return bool(scores[0, 6] == float("-inf"))


def block_repeated_ngrams() -> None:
    """fairseq's ``--no-repeat-ngram-size`` does nothing without its CUDA extension.

    What it compares with are the last places of the generator's buffer, which are padding up to the last step; and for
    single words, all places.
    """
    if all(map(blocks_within_a_longer_buffer, (1, 2))):
        return
    find = NGramRepeatBlock._no_repeat_ngram

    @in_place_of(NGramRepeatBlock, "_no_repeat_ngram")
    def _no_repeat_ngram(self: Any, tokens: Tensor, lprobs: Tensor, bsz: int, beam_size: int, step: int) -> Tensor:
        if self.no_repeat_ngram_size == 1:
            others = lprobs.scatter(1, tokens[:, 1 : step + 1], -math.inf)  # the first is no word
            return lprobs.where(others.isneginf().all(dim=1, keepdim=True), others)  # but what a prefix repeats
        return find(self, tokens[:, : step + 1], lprobs, bsz, beam_size, step)


def takes_hard_alignments(replace: Callable[..., str]) -> bool:
    """Probe: whether ``replace`` understands the alignments that fairseq's generator makes."""
    try:
        return replace("<unk>", "word", [(0, 0)], {}, "<unk>") == "word"
    except TypeError:
        return False


def build_generators() -> None:
    """One wrapper of what makes them: it refuses what none does, and lets them keep what unknown words stand for.

    A language model has words of its own, ``dict.txt``, which fairseq takes for the target's where they are as many.
    """
    build = FairseqTask.build_generator
    replaces = not takes_hard_alignments(utils.replace_unk)

    @in_place_of(FairseqTask, "build_generator")
    def build_generator(self: Any, models: Any, args: Any, *more: Any, **others: Any) -> Any:
        words = len(self.target_dictionary or ())
        refuse("python", getattr(self, "cfg", None), args, {"task": type(self), "words": words or None})
        language_model = (others.get("extra_gen_cls_kwargs") or {}).get("lm_model")
        if language_model is not None and language_model.decoder.dictionary != self.target_dictionary:
            raise ValueError("--lm-path: the language model (dict.txt) has other words than the translations")
        generator = build(self, models, args, *more, **others)
        # --score-reference comes with a generator of another kind, which translates nothing.
        if replaces and getattr(args, "replace_unk", None) is not None and not getattr(args, "score_reference", False):
            keep_source_words(self, generator, getattr(getattr(self, "cfg", None), "attention_offset", 0))
        return generator


def leave_blank_lines_blank() -> None:
    """fairseq translates a line without words, and a model that has not seen any invents a word.

    White space in pieces of sentencepiece is no word either.

    Its translations have no words, as those of exported folders, unless the caller forces some.  There is nothing to
    probe: every search goes on until a model ends the sentence.
    """
    translate = TranslationTask.inference_step

    @in_place_of(TranslationTask, "inference_step")
    def inference_step(
        self: Any,
        generator: Any,
        models: Any,
        sample: dict[str, Any],
        prefix_tokens: Tensor | None = None,
        constraints: Tensor | None = None,
    ) -> Any:
        found = translate(self, generator, models, sample, prefix_tokens, constraints)
        if prefix_tokens is None and not isinstance(generator, SequenceScorer):
            pad, rows = self.source_dictionary.pad(), sample["net_input"]["src_tokens"].tolist()
            sources = ([self.source_dictionary[token] for token in row if token != pad] for row in rows)
            blank = torch.tensor([is_blank(words[:-1]) for words in sources])  # the last one is the end
            if constraints is not None:
                blank &= constraints[:, 0].eq(0).cpu()  # their number comes first
            for hypotheses in compress(found, blank.tolist()):
                for hypothesis in hypotheses:
                    remove_words(hypothesis, self.target_dictionary.eos())
        return found


def is_blank(words: list[str]) -> bool:
    """Whether a source has no words, but perhaps pieces and bytes of sentencepiece that are white space."""
    text = bytearray()
    for word in words:
        if byte := re.fullmatch("<0x([0-9A-F]{2})>", word):
            text.append(int(byte[1], 16))
        elif word.strip("\u2581"):
            return False
    return not text.decode(errors="replace").strip()


def remove_words(hypothesis: dict[str, Any], eos: int) -> None:
    """Leave the end of the sentence, which costs nothing."""
    attention, alignment = hypothesis.get("attention"), hypothesis.get("alignment")
    hypothesis["tokens"] = hypothesis["tokens"].new_tensor([eos])
    hypothesis["score"] = torch.zeros(())
    hypothesis["positional_scores"] = hypothesis["positional_scores"].new_zeros(1)
    if isinstance(attention, Tensor) and attention.dim() == 2:  # (source tokens, target tokens)
        hypothesis["attention"] = attention[:, :1]
    if isinstance(alignment, list):
        del alignment[1:]


def replace_unknown_words_by_attention() -> None:
    """fairseq's ``--replace-unk`` fails at an unknown word, and ``fairseq-interactive`` loses those of the source.

    Models are prepared to report attention, from which each unknown word gets its place in the source.
    """
    if takes_hard_alignments(utils.replace_unk):
        return
    prepare, post_process = BaseFairseqModel.prepare_for_inference_, utils.post_process_prediction

    @in_place_of(BaseFairseqModel, "prepare_for_inference_")
    def prepare_for_inference_(self: Any, cfg: Any) -> None:
        align = getattr(cfg.generation, "print_alignment", None)
        if getattr(cfg.generation, "replace_unk", None) is not None and not align:
            cfg = copy.deepcopy(cfg)
            cfg.generation.print_alignment = "hard"
        prepare(self, cfg)

    @in_place_of(utils, "post_process_prediction")
    def post_process_prediction(
        hypo_tokens: Tensor,
        src_str: str,
        alignment: Any,
        align_dict: dict[str, str] | None,
        tgt_dict: Dictionary,
        remove_bpe: str | None = None,
        extra_symbols_to_ignore: Any = None,
    ) -> tuple[Tensor, str, Any]:
        tokens, text, alignment = post_process(
            hypo_tokens, src_str, alignment, None, tgt_dict, remove_bpe, extra_symbols_to_ignore
        )
        if align_dict is None:
            return tokens, text, alignment
        text = replace_unknown_words(tokens, text, alignment, src_str, align_dict, tgt_dict)
        # The dictionary learns no word from it, which a later sentence would take for one that the model knows.
        return tgt_dict.encode_line(text, add_if_not_exist=False), text, alignment

    utils.load_align_dict = read_translations
