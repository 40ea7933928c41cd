"""Texts, dictionaries, embeddings and binarised data: lines stay aligned, and errors name the file."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from traceback import extract_tb
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from fairseq import file_chunker_utils, utils
from fairseq.data import Dictionary, data_utils, indexed_dataset
from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE
from fairseq.file_chunker_utils import Chunker
from fairseq.file_io import PathManager
from fairseq.tasks import translation
from torch import Tensor

from fairseq_plugins.common.files import count_lines
from fairseq_plugins.repairs.wrapping import mentions, programs, raises, wrap

# First bytes of the pointer files that Git LFS and git-annex store instead of large files.
POINTERS = (b"version https://git-lfs", b"/annex/objects/")
OVERWRITE = "#fairseq:overwrite"


def ends_lines_at_carriage_returns() -> bool:
    """Probe: whether fairseq opens texts without ``newline``.  It reads the code, because a call would need a file."""
    return "open" not in vars(file_chunker_utils) and "newline" not in str(Chunker.__enter__.__code__.co_consts)


def open_text(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
    """Open a file so that only a line feed ends a line of text."""
    return open(file, mode, *args, **(options if "b" in mode else {"newline": "\n", **options}))  # noqa: PTH123


def end_lines_at_line_feeds() -> None:
    """Split texts into lines only at line feeds; fairseq misaligns all pairs after a carriage return inside a line."""
    if ends_lines_at_carriage_returns():
        for module in (file_chunker_utils, indexed_dataset, *programs("preprocess", "_make_all")):
            module.open = open_text


def refuse_misaligned_texts() -> None:
    """Refuse empty or misaligned texts before ``fairseq-preprocess`` writes anything.

    No probe is needed: aligned texts are not affected.
    """
    for program in programs("preprocess", "_make_all"):
        main = program.main

        @wrap(program, "main")
        def check_and_run(args: Namespace, main: Any = main) -> None:
            if not args.dict_only:
                check_texts(args)
            main(args)


def check_texts(args: Namespace) -> None:
    """Check all texts of a call of ``fairseq-preprocess``.

    Raises:
        OSError: a text cannot be read.
        ValueError: a text has no lines or cannot be decoded, or two texts have different numbers of lines.
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
                raise ValueError(f"--{option}: {found}; give line-aligned files")


def name_unusable_data() -> None:
    """Name the file if data has no sentences, or its sides have different numbers of sentences.

    No probe is needed: other data is not affected.
    """
    load, pair = data_utils.load_indexed_dataset, translation.load_langpair_dataset

    @wrap(data_utils, "load_indexed_dataset")
    def load_indexed_dataset(path: str, *args: Any, **options: Any) -> Any:
        for file in (Path(path), Path(f"{path}.bin")):
            if file.is_file() and file.stat().st_size == 0:
                raise ValueError(f"{file} has no sentences: run fairseq-preprocess with a text that has some")
        return load(path, *args, **options)

    @wrap(translation, "load_langpair_dataset")
    def load_langpair_dataset(data_path: str, split: str, *args: Any, **options: Any) -> Any:
        try:
            return pair(data_path, split, *args, **options)
        except AssertionError as error:
            if "same number" not in str(error):
                raise
            raise ValueError(
                f"{Path(data_path, split)}: {error}; run fairseq-preprocess with two line-aligned texts"
            ) from None


def name_empty_translations() -> None:
    """Explain why all sentences were skipped; ``fairseq-generate`` then divides by zero.

    The probe is the ZeroDivisionError.
    """
    for program in programs("generate", "get_symbols_to_strip_from_output"):
        main = program.main

        @wrap(program, "main")
        def run(cfg: Any, main: Any = main) -> Any:
            try:
                return main(cfg)
            except ZeroDivisionError as error:
                if extract_tb(error.__traceback__)[-1].name != "_main":
                    raise
                raise ValueError(
                    "--gen-subset: no sentence was translated, because all are too long for the model or --max-tokens, "
                    "or this shard is empty; raise --max-tokens or use fewer shards"
                ) from None


def name_bad_lines_of_dictionaries() -> None:
    """Name file, line and fix for a dictionary that fairseq cannot read, and refuse one without words.

    No probe is needed: other dictionaries are not affected.
    """
    add = Dictionary.add_from_file

    @wrap(Dictionary, "add_from_file")
    def add_from_file(self: Any, f: Any) -> None:
        if not isinstance(f, str):  # an open file, from fairseq's own method
            add(self, f)
            return
        before = len(self)
        try:
            add(self, f)
            fault = None
            if len(self) == before:
                fault = "the dictionary has no words"
            elif self[before].startswith("\ufeff"):
                fault = "line 1 begins with a byte order mark, which would become part of the word"
        except OSError:
            raise
        except Exception as error:  # fairseq raises three kinds of errors
            fault = first_fault(f) or str(error)
        if fault is not None:
            raise ValueError(f"{f}: {fault}; restore the training's dictionary, or make one with fairseq-preprocess")


def first_fault(name: str) -> str | None:
    """Describe the first line of a dictionary that fairseq cannot read."""
    seen: dict[str, int] = {}
    lines = Path(PathManager.get_local_path(name)).read_bytes().splitlines()
    if lines and lines[0].startswith(POINTERS):
        return "line 1: the file is a pointer to a large file; run git lfs pull or git annex get"
    for number, line in enumerate(lines, start=1):
        try:
            text = line.decode().rstrip()
        except UnicodeDecodeError as error:
            return f"line {number} is not UTF-8: {error}"
        word, space, count = text.removesuffix(f" {OVERWRITE}").rpartition(" ")
        if not space or raises(ValueError, int, count):
            return f"line {number}: expected `word count` with one space, found {text[:100]!r}"
        if word in seen and not text.endswith(OVERWRITE):
            return f"line {number}: duplicate word {word!r}, first in line {seen[word]}"
        seen[word] = number
    return None


def restore_numpy_compat() -> None:
    """Restore ``np.compat.long``, which data sets of language models use, if it is missing, as in NumPy 2."""
    if not hasattr(np, "compat"):
        vars(np)["compat"] = SimpleNamespace(long=int)


def read_first_embedding() -> None:
    """Read the first word of an embedding file without a header, such as GloVe's; fairseq skips this word.

    The file is given by ``--encoder-embed-path``.  A header is two integers: the number of words and their dimension.
    """
    parse = utils.parse_embedding
    if not mentions(parse, "next"):  # the probe: whether it always skips a line
        return

    @wrap(utils, "parse_embedding")
    def parse_embedding(embed_path: str) -> dict[str, Tensor]:
        with Path(embed_path).open() as file:
            word, *numbers = file.readline().rstrip().split(" ")
        vectors = parse(embed_path)
        if len(numbers) != 1 or not (word + numbers[0]).isdecimal():
            vectors = {word: torch.tensor([float(number) for number in numbers]), **vectors}
        return vectors


def decode_pieces_with_their_model() -> None:
    """Decode ``--bpe sentencepiece`` by the sentencepiece model; fairseq prints byte tokens such as ``<0xC3> <0xA4>``.

    fairseq also drops spaces at both ends of a line.  This repair turns line feeds into spaces, so that each
    translation is one line.
    """
    if raises(AttributeError, SentencepieceBPE.decode, None, "\u2581a"):  # the probe: whether decoding uses the model
        return

    @wrap(SentencepieceBPE, "decode")
    def decode(self: Any, x: str) -> str:
        return str(self.sp.decode(x.split(" "))).replace("\n", " ")
