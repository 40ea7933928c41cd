"""Export of a checkpoint."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from fairseq import checkpoint_utils
from fairseq.tasks.translation import TranslationTask

from fairseq_plugins.cli.arguments import import_user_dir
from fairseq_plugins.cli.files import naming_file_in_errors
from fairseq_plugins.cli.own_data.results import card_of
from fairseq_plugins.common.files import beside, naming
from fairseq_plugins.common.model import IncrementalDecoder
from fairseq_plugins.common.subwords import bpe_symbol
from fairseq_plugins.export.model import write_folder
from fairseq_plugins.search.config import TranslationFastConfig
from fairseq_plugins.vocabulary.candidates import Candidates


def export(args: Namespace) -> None:
    """Write the folder that the arguments of `fairseq-plugins export` describe.

    Raises:
        ValueError: the checkpoint is not from this plugin, or a file does not match it.
        OSError: a file cannot be read or written.
    """
    given = args.candidates_per_word, args.frequent_candidates
    import_user_dir(args.user_dir)
    overrides = {"data": args.data, "source_lang": args.source_lang, "target_lang": args.target_lang}
    model, task = load(args.checkpoint, {name: str(value) for name, value in overrides.items() if value is not None})
    source, target = task.source_dictionary, task.target_dictionary
    warning = about_subwords(source.symbols, args.bpe_codes is not None, args.sentencepiece_model is not None)
    if warning:
        print(f"warning: {warning}", file=sys.stderr)
    candidates = None
    if args.candidates is not None:
        defaults = TranslationFastConfig.candidates_per_word, TranslationFastConfig.frequent_candidates
        numbers = (default if number is None else number for number, default in zip(given, defaults, strict=True))
        candidates = Candidates.read(args.candidates, source, target, *numbers)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with naming(args.output), beside(args.output) as unfinished:
        unfinished.mkdir()
        write_folder(
            unfinished,
            model,
            source,
            target,
            codes=args.bpe_codes,
            pieces=args.sentencepiece_model,
            tokenizer=args.tokenizer,
            languages=(task.cfg.source_lang, task.cfg.target_lang),
            longest_source=task.max_positions()[0],
            int8=args.int8,
            candidates=candidates,
            card=card_of(args.checkpoint),
        )


def about_subwords(words: list[str], has_codes: bool, has_pieces: bool) -> str | None:
    """Return a warning if the given subword model does not match the dictionary of the translation model."""
    kind = bpe_symbol(words)
    if kind == "sentencepiece" and not has_pieces:
        return "without --sentencepiece-model the exported folder reads and writes sentencepiece pieces instead of text"
    if kind == "subword_nmt" and not has_codes:
        return "without --bpe-codes the exported folder reads text that is already split into subwords"
    if has_codes and kind != "subword_nmt":
        return "--bpe-codes: no word in the model's dictionary ends in @@; check that these are the model's codes"
    if has_pieces and kind != "sentencepiece":
        return "--sentencepiece-model: the model's dictionary has no sentencepiece pieces; check the file"
    return None


def load(checkpoint: Path, overrides: dict[str, str]) -> tuple[Any, Any]:
    """Load a model for inference, and its task; ``overrides`` replaces options of both.

    Raises:
        ValueError: the checkpoint is unreadable, not from this plugin, or from an unsupported task.
    """
    load_models = checkpoint_utils.load_model_ensemble_and_task
    try:
        with naming_file_in_errors(checkpoint, "cannot be exported"):
            (model,), _, task = load_models([str(checkpoint)], arg_overrides=overrides)
    except FileNotFoundError as error:
        raise ValueError(f"{error.filename} does not exist: give the folder of the dictionaries with --data") from error
    if not isinstance(getattr(model, "decoder", None), IncrementalDecoder):
        raise ValueError(
            f"{checkpoint} contains {type(model).__name__}, which is not a model of this plugin; give a checkpoint "
            "of this plugin, or convert fconv with fairseq-plugins import-fconv"
        )
    if not isinstance(task, TranslationTask):  # Multilingual tasks add language symbols to source and target.
        raise ValueError(
            f"{checkpoint} was trained with {type(task).__name__}, and only --task translation and translation_fast "
            "can be exported; give another checkpoint"
        )
    model.eval()
    model.make_generation_fast_(need_attn=True)
    return model, task
