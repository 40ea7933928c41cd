"""``fairseq-plugins export``: a folder that translates without fairseq and without torch.

It holds the model as ONNX programs, dictionaries, codes, and ``translate.py``, which needs numpy and onnxruntime.
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
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="of a model of this plugin")
    parser.add_argument("output", type=Path, metavar="OUT", help="folder to write, which does not exist")
    parser.add_argument(
        "--data", type=Path, metavar="DATA_BIN", help="where the dictionaries are (default: the checkpoint's)"
    )
    parser.add_argument("-s", "--source-lang", metavar="XX", help="source language (default: told by the data's names)")
    parser.add_argument("-t", "--target-lang", metavar="XX", help="target language (default: told by the data's names)")
    add_user_dir(parser)
    parser.add_argument("--bpe-codes", type=Path, metavar="CODES", help="codes of subword-nmt, for a model of subwords")
    parser.add_argument(
        "--sentencepiece-model", type=Path, metavar="FILE", help="model of sentencepiece, for a model of its pieces"
    )
    parser.add_argument("--tokenizer", choices=["moses"], help="how a line becomes words (default: it is in words)")
    parser.add_argument("--int8", action="store_true", help="products in int8: a quarter of the size, and faster")
    parser.add_argument(
        "--candidates",
        type=Path,
        metavar="FOLDER",
        help="predict only words that a batch may need, as translation_fast",
    )
    parser.add_argument("--candidates-per-word", type=int, metavar="N", help="as of translation_fast (default: 20)")
    parser.add_argument("--frequent-candidates", type=int, metavar="N", help="as of translation_fast (default: 1000)")


def run(args: Namespace) -> None:
    """Export one model.

    Raises:
        ValueError: the checkpoint is none of this plugin's, a file does not fit it, or the output exists.
        OSError: a file cannot be read or written.
    """
    refuse_existing(args.output)
    for path in (args.checkpoint, args.bpe_codes, args.sentencepiece_model):
        if path is not None and not path.is_file():
            raise ValueError(
                f"there is no file {path}" + (": one checkpoint is exported, no ensemble" if ":" in str(path) else "")
            )
    if args.sentencepiece_model is not None and (args.bpe_codes is not None or args.tokenizer is not None):
        raise ValueError("--sentencepiece-model reads plain text: leave out --bpe-codes and --tokenizer")
    if args.bpe_codes is not None:
        segmenter(args.bpe_codes)
    given = args.candidates_per_word, args.frequent_candidates
    if args.candidates is None and given != (None, None):
        raise ValueError("--candidates-per-word and --frequent-candidates need --candidates FOLDER")
    for name in ("frequent.txt", "candidates.txt") if args.candidates is not None else ():
        if not (args.candidates / name).is_file():
            raise ValueError(f"{args.candidates / name} does not exist")
    if find_spec("onnx") is None:
        raise ValueError("this needs the package onnx: pip install onnx onnxruntime")
    if args.data is not None and not args.data.is_dir():
        raise ValueError(f"--data: {args.data} is no folder")
    from fairseq_plugins.cli.exporting import export  # noqa: PLC0415  (with torch and fairseq: seconds)

    fairseq_plugins.install()
    export(args)
    program = shlex.quote(str(args.output / "translate.py"))
    print(f"{args.output}: translate with python {program} < source.txt > translation.txt")
