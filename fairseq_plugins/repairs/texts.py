"""Parallel texts: line by line, in ``fairseq-preprocess`` and in data sets."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from traceback import extract_tb
from typing import Any

from fairseq import file_chunker_utils
from fairseq.data import data_utils, indexed_dataset
from fairseq.file_chunker_utils import Chunker
from fairseq.file_io import PathManager
from fairseq.tasks import translation

from fairseq_plugins.common.lines import count_lines
from fairseq_plugins.repairs.wrapping import in_place_of


def ends_lines_at_carriage_returns() -> bool:
    """Probe: whether fairseq opens texts without ``newline``; its code is read, for it takes the name of a file."""
    mended = "open" in vars(file_chunker_utils) or "newline" in str(Chunker.__enter__.__code__.co_consts)
    return not mended


def open_text(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
    """Python's ``open``; only a line feed ends a line of text."""
    return open(file, mode, *args, **(options if "b" in mode else {"newline": "\n", **options}))  # noqa: PTH123


def end_lines_at_line_feeds() -> None:
    """fairseq ends a line of a text at a carriage return too, and pairs all lines after it with the wrong ones."""
    if ends_lines_at_carriage_returns():
        for module in (file_chunker_utils, indexed_dataset, *programs("preprocess", "_make_all")):
            module.open = open_text


def programs(name: str, function: str) -> Iterator[Any]:
    """The modules of one of fairseq's commands, which may have been started as a script or as a module.

    Args:
        name: of the command.
        function: by which its module is known.
    """
    for module in (sys.modules.get(f"fairseq_cli.{name}"), sys.modules.get("__main__")):
        if hasattr(module, function):
            yield module


def refuse_texts_that_do_not_match() -> None:
    """``fairseq-preprocess`` takes texts with different numbers of lines, or none, and training fails with its data.

    They are refused before anything is written. There is nothing to probe: texts that match are left alone.
    """
    for program in programs("preprocess", "_make_all"):
        main = program.main

        @in_place_of(program, "main")
        def check_and_run(args: Namespace, main: Any = main) -> None:
            if not args.dict_only:
                check_texts(args)
            main(args)


def check_texts(args: Namespace) -> None:
    """Check all texts that ``fairseq-preprocess`` is given.

    Raises:
        OSError: one cannot be read.
        ValueError: one has no lines or cannot be decoded, or two have different numbers of lines.
    """
    ends = [args.source_lang] if args.only_source else [args.source_lang, args.target_lang]
    for option in ("trainpref", "validpref", "testpref"):
        given = getattr(args, option) or ""
        for prefix in filter(None, [given] if option == "trainpref" else given.split(",")):
            names = [prefix if end is None else f"{prefix}.{end}" for end in ends]
            names += filter(PathManager.exists, [f"{prefix}.{args.align_suffix}"] if args.align_suffix else [])
            names += [args.alignfile] if option == "trainpref" and args.alignfile else []
            counts = {name: count_lines(Path(PathManager.get_local_path(name))) for name in names}
            if len({*counts.values()}) > 1:
                found = ", ".join(f"{name} has {count} lines" for name, count in counts.items())
                raise ValueError(f"--{option}: {found}; line N of one must belong to line N of the others")


def name_data_of_no_use() -> None:
    """Data without sentences fails with "cannot mmap an empty file", and sides of different lengths by an assertion.

    Both errors name no file. There is nothing to probe: other data is left alone.
    """
    load, pair = data_utils.load_indexed_dataset, translation.load_langpair_dataset

    @in_place_of(data_utils, "load_indexed_dataset")
    def load_indexed_dataset(path: str, *args: Any, **options: Any) -> Any:
        for file in (Path(path), Path(f"{path}.bin")):
            if file.is_file() and file.stat().st_size == 0:
                raise ValueError(f"{file} has no sentences: run fairseq-preprocess with a text that has some")
        return load(path, *args, **options)

    @in_place_of(translation, "load_langpair_dataset")
    def load_langpair_dataset(data_path: str, split: str, *args: Any, **options: Any) -> Any:
        try:
            return pair(data_path, split, *args, **options)
        except AssertionError as error:
            if "same number" not in str(error):
                raise
            raise ValueError(
                f"{Path(data_path, split)}: {error}; run fairseq-preprocess with two texts of which line N translates "
                "line N"
            ) from None


def say_that_nothing_was_translated() -> None:
    """``fairseq-generate`` divides by zero where all sentences are skipped.

    The probe comes with the error.
    """
    for program in programs("generate", "get_symbols_to_strip_from_output"):
        main = program.main

        @in_place_of(program, "main")
        def run_and_tell(cfg: Any, main: Any = main) -> Any:
            try:
                return main(cfg)
            except ZeroDivisionError as error:
                if extract_tb(error.__traceback__)[-1].name != "_main":
                    raise
                raise ValueError(
                    "--gen-subset: no sentence was translated: all are too long for the model or --max-tokens, or this "
                    "shard has none"
                ) from None
