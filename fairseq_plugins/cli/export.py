"""``fairseq-plugins export``: a folder that translates without fairseq and without torch.

It holds the model as ONNX programs, dictionaries, codes, and ``translate.py``, which needs numpy and onnxruntime.
"""

from __future__ import annotations

import shlex
import sys
from argparse import ArgumentParser, Namespace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fairseq import checkpoint_utils
from fairseq.tasks.translation import TranslationTask

import fairseq_plugins
from fairseq_plugins.cli.any_file import blaming
from fairseq_plugins.cli.arguments import add_user_dir, import_user_dir, refuse_existing
from fairseq_plugins.cli.own_data.parallel_text import segmenter
from fairseq_plugins.common.model import IncrementalDecoder
from fairseq_plugins.common.subwords import bpe_symbol
from fairseq_plugins.common.whole_file import beside, naming
from fairseq_plugins.search.config import TranslationFastConfig
from fairseq_plugins.vocabulary.candidates import Candidates


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
    fairseq_plugins.install()
    refuse_existing(args.output)
    for path in (args.checkpoint, args.bpe_codes):
        if path is not None and not path.is_file():
            raise ValueError(
                f"there is no file {path}" + (": one checkpoint is exported, no ensemble" if ":" in str(path) else "")
            )
    if args.bpe_codes is not None:
        segmenter(args.bpe_codes)
    given = args.candidates_per_word, args.frequent_candidates
    if args.candidates is None and given != (None, None):
        raise ValueError("--candidates-per-word and --frequent-candidates go with --candidates")
    if find_spec("onnx") is None:
        raise ValueError("this needs the package onnx: pip install '.[export]'")
    from fairseq_plugins.export.folder import write_folder  # noqa: PLC0415  (onnx is an extra)

    import_user_dir(args.user_dir)
    overrides = {"data": args.data, "source_lang": args.source_lang, "target_lang": args.target_lang}
    model, task = load(args.checkpoint, {name: str(value) for name, value in overrides.items() if value is not None})
    source, target = task.source_dictionary, task.target_dictionary
    warning = about_subwords(source.symbols, args.bpe_codes is not None)
    if warning:
        print(f"warning: {warning}", file=sys.stderr)
    candidates = None
    if args.candidates is not None:
        defaults = TranslationFastConfig.candidates_per_word, TranslationFastConfig.frequent_candidates
        numbers = (default if number is None else number for number, default in zip(given, defaults, strict=True))
        candidates = Candidates.read(args.candidates, source, target, *numbers)
    languages = (task.cfg.source_lang, task.cfg.target_lang) if args.tokenizer else None
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with naming(args.output), beside(args.output) as unfinished:
        unfinished.mkdir()
        write_folder(
            unfinished,
            model,
            source,
            target,
            codes=args.bpe_codes,
            languages=languages,
            longest_source=task.max_positions()[0],
            int8=args.int8,
            candidates=candidates,
        )
    program = shlex.quote(str(args.output / "translate.py"))
    print(f"{args.output}: translate with python {program} < source.txt > translation.txt")


def about_subwords(words: list[str], has_codes: bool) -> str | None:
    """What somebody should know who gives the folder text: where its units are not what codes, or their lack, make."""
    kind = bpe_symbol(words)
    if kind == "sentencepiece":
        return "the model has pieces of sentencepiece, and the folder takes and gives only text that is in them"
    if kind and not has_codes:
        return "the model has subwords, and without --bpe-codes the folder takes only text that is in them"
    if has_codes and not kind:
        return "--bpe-codes splits words with @@, and no word of the model's ends so: are they its codes?"
    return None


def load(checkpoint: Path, overrides: dict[str, str]) -> tuple[Any, Any]:
    """A model that is prepared to translate, and its task, some of whose options are others than in the checkpoint.

    Raises:
        ValueError: it cannot be read, is not of this plugin, or of a task that does more than translate.
    """
    load_models = checkpoint_utils.load_model_ensemble_and_task
    data = overrides.get("data")
    if data is not None and not Path(data).is_dir():
        raise ValueError(f"--data: {data} is no folder")
    try:
        with blaming(checkpoint, "cannot be exported"):
            (model,), _, task = load_models([str(checkpoint)], arg_overrides=overrides)
    except FileNotFoundError as error:
        raise ValueError(f"{error.filename} does not exist: --data DATA_BIN says where the dictionaries are") from error
    if not isinstance(getattr(model, "decoder", None), IncrementalDecoder):
        raise ValueError(
            f"{checkpoint} holds {type(model).__name__}, and not a model of this plugin (fairseq-plugins import-fconv "
            "makes one of fairseq's fconv)"
        )
    if not isinstance(task, TranslationTask):  # those of several languages put symbols into source and target
        raise ValueError(f"{checkpoint} is of {type(task).__name__}, and a folder knows only the task translation")
    model.eval()
    model.make_generation_fast_(need_attn=True)
    return model, task
