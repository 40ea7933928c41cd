"""Export a model to a folder that translates without fairseq and PyTorch.

The folder contains ONNX programs, dictionaries, the subword model, and translate.py, which needs numpy and onnxruntime.
"""

from __future__ import annotations

import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fairseq_plugins
from fairseq_plugins.cli.arguments import add_user_dir, import_user_dir
from fairseq_plugins.cli.own_data.folder import BEST, find_model
from fairseq_plugins.cli.parallel_text import segmenter
from fairseq_plugins.common.files import beside, naming, naming_file_in_errors, refuse_existing
from fairseq_plugins.common.text import bpe_symbol


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT",
        help="checkpoint of this plugin's models, or own-data's OUT, which also has the dictionaries and subwords",
    )
    parser.add_argument("output", type=Path, metavar="FOLDER", help="folder to create")
    parser.add_argument(
        "--arch", help="with own-data's folder: architecture of the model (default: the only trained model)"
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DATA_BIN",
        help="folder of the dictionaries (default: the data folder of the training)",
    )
    parser.add_argument(
        "-s", "--source-lang", metavar="XX", help="source language (default: taken from the file names in DATA_BIN)"
    )
    parser.add_argument(
        "-t", "--target-lang", metavar="XX", help="target language (default: taken from the file names in DATA_BIN)"
    )
    add_user_dir(parser)
    parser.add_argument("--bpe-codes", type=Path, metavar="CODES", help="BPE codes of subword-nmt")
    parser.add_argument("--sentencepiece-model", type=Path, metavar="FILE", help="sentencepiece model")
    parser.add_argument("--tokenizer", choices=["moses"], help="tokenizer of the text (default: split at white space)")
    parser.add_argument(
        "--int8",
        action="store_true",
        help="store and multiply weights in int8, which is smaller and faster than float32",
    )
    parser.add_argument(
        "--candidates",
        type=Path,
        metavar="FOLDER",
        help="predict only candidate words from this folder, which fairseq-plugins lexicon wrote",
    )
    parser.add_argument(
        "--candidates-per-word",
        type=int,
        metavar="N",
        help="with --candidates: number of translations of each source word (default: 20)",
    )
    parser.add_argument(
        "--frequent-candidates",
        type=int,
        metavar="N",
        help="with --candidates: number of frequent target words (default: 1000)",
    )


def run(args: Namespace) -> None:
    """Export one model."""
    refuse_existing(args.output, makes_folder=True)
    if args.checkpoint.is_dir():
        read_own_data(args)
    elif args.arch is not None:
        raise ValueError(f"--arch: {args.checkpoint} is not own-data's folder; remove the option")
    for path in (args.checkpoint, args.bpe_codes, args.sentencepiece_model):
        if path is not None and not path.is_file():
            fix = "an ensemble cannot be exported, give one checkpoint" if ":" in str(path) else "check the path"
            raise ValueError(f"{path} is not a file: {fix}")
    if args.sentencepiece_model is not None and (args.bpe_codes is not None or args.tokenizer is not None):
        raise ValueError("--sentencepiece-model cannot be combined with --bpe-codes or --tokenizer: remove them")
    if args.bpe_codes is not None:
        segmenter(args.bpe_codes)
    if args.candidates is None and (args.candidates_per_word, args.frequent_candidates) != (None, None):
        raise ValueError("--candidates-per-word and --frequent-candidates need --candidates FOLDER")
    if find_spec("onnx") is None:
        raise ValueError("export needs the package onnx: pip install onnx onnxruntime")
    fairseq_plugins.install()
    import_user_dir(args.user_dir)
    write(args)
    program = shlex.quote(str(args.output / "translate.py"))
    print(f"{args.output}: translate with python {program} < source.txt > translation.txt")


def read_own_data(args: Namespace) -> None:
    """Replace own-data's folder in ``args`` by its checkpoint, dictionaries and subwords."""
    folder, model = find_model(args.checkpoint, args.arch)
    args.checkpoint = model / BEST
    found = {"data": folder.binary, "source_lang": None, "target_lang": None, **folder.preprocessing}
    for name, value in found.items():
        if getattr(args, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option}: not allowed with own-data's folder {folder.path}; remove the option")
        setattr(args, name, value)


def write(args: Namespace) -> None:
    """Write the folder."""
    from fairseq_plugins.cli.own_data.results import card_of
    from fairseq_plugins.export.model import write_folder
    from fairseq_plugins.search.task import TranslationFastConfig as Defaults
    from fairseq_plugins.vocabulary.candidates import Candidates

    refuse_other_direction(args)
    overrides = {"data": args.data, "source_lang": args.source_lang, "target_lang": args.target_lang}
    model, task = load(args.checkpoint, {name: str(value) for name, value in overrides.items() if value is not None})
    source, target = task.source_dictionary, task.target_dictionary
    warning = about_subwords(source.symbols, args.bpe_codes is not None, args.sentencepiece_model is not None)
    if warning:
        print(f"warning: {warning}", file=sys.stderr)
    candidates = None
    if args.candidates is not None:
        per_word, frequent = args.candidates_per_word, args.frequent_candidates
        per_word = Defaults.candidates_per_word if per_word is None else per_word
        frequent = Defaults.frequent_candidates if frequent is None else frequent
        candidates = Candidates.read(args.candidates, source, target, per_word, frequent)
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


def refuse_other_direction(args: Namespace) -> None:
    """Refuse languages that reverse the direction of the training.

    If both languages share a dictionary, fairseq accepts the reversed languages without an error.
    """
    from fairseq.checkpoint_utils import load_checkpoint_to_cpu

    if args.source_lang is None and args.target_lang is None:
        return
    with naming_file_in_errors(args.checkpoint, "cannot be exported"):
        task = load_checkpoint_to_cpu(str(args.checkpoint))["cfg"]["task"]
    source, target = (getattr(task, name, None) for name in ("source_lang", "target_lang"))
    for option, given, other in (
        ("--source-lang", args.source_lang, target),
        ("--target-lang", args.target_lang, source),
    ):
        if given is not None and given == other:
            raise ValueError(f"{option} {given}: the model translates {source} to {target}; leave out the option")


def about_subwords(words: Sequence[str], has_codes: bool, has_pieces: bool) -> str | None:
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
    """Load a model for inference, and its task; ``overrides`` replaces options of the model and the task."""
    from fairseq import checkpoint_utils
    from fairseq.tasks.translation import TranslationTask

    from fairseq_plugins.common.model import IncrementalDecoder

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
            f"{checkpoint} was trained with {type(task).__name__}, and only models of --task translation and "
            "translation_fast can be exported; give another checkpoint"
        )
    model.eval()
    model.make_generation_fast_(need_attn=True)
    return model, task
