"""Export a model to a folder that translates without fairseq and PyTorch.

The folder contains the model as ONNX programs, dictionaries, subwords, and translate.py, which needs numpy and
onnxruntime.
"""

from __future__ import annotations

import shlex
from argparse import ArgumentParser, Namespace
from importlib.util import find_spec
from pathlib import Path

import fairseq_plugins
from fairseq_plugins.cli.arguments import add_user_dir
from fairseq_plugins.cli.files import refuse_existing
from fairseq_plugins.cli.own_data.parallel_text import segmenter


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="checkpoint of this plugin's models")
    parser.add_argument("output", type=Path, metavar="OUT", help="folder to create")
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
    parser.add_argument("--int8", action="store_true", help="store and multiply weights in int8: smaller and faster")
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
    """Export one model.

    Raises:
        ValueError: the checkpoint is not from this plugin, a file does not match it, or the output exists.
        OSError: a file cannot be read or written.
    """
    refuse_existing(args.output)
    for path in (args.checkpoint, args.bpe_codes, args.sentencepiece_model):
        if path is not None and not path.is_file():
            fix = "an ensemble cannot be exported, give one checkpoint" if ":" in str(path) else "check the path"
            raise ValueError(f"{path} is not a file: {fix}")
    if args.sentencepiece_model is not None and (args.bpe_codes is not None or args.tokenizer is not None):
        raise ValueError("--sentencepiece-model cannot be combined with --bpe-codes or --tokenizer: remove them")
    if args.bpe_codes is not None:
        segmenter(args.bpe_codes)
    given = args.candidates_per_word, args.frequent_candidates
    if args.candidates is None and given != (None, None):
        raise ValueError("--candidates-per-word and --frequent-candidates need --candidates FOLDER")
    for name in ("frequent.txt", "candidates.txt") if args.candidates is not None else ():
        if not (args.candidates / name).is_file():
            raise ValueError(
                f"--candidates: {args.candidates / name} does not exist; run fairseq-plugins lexicon first"
            )
    if find_spec("onnx") is None:
        raise ValueError("export needs the package onnx: pip install onnx onnxruntime")
    if args.data is not None and not args.data.is_dir():
        raise ValueError(f"--data {args.data}: not a folder; give the folder of dict.XX.txt")
    from fairseq_plugins.cli.exporting import export  # noqa: PLC0415  (importing fairseq takes seconds)

    fairseq_plugins.install()
    export(args)
    program = shlex.quote(str(args.output / "translate.py"))
    print(f"{args.output}: translate with python {program} < source.txt > translation.txt")
