"""Texts and dictionaries: lines stay aligned, every line is translated, and subwords are restored."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from fairseq import file_chunker_utils, utils
from fairseq.data import Dictionary, indexed_dataset
from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE
from fairseq.data.encoders.subword_nmt_bpe import SubwordNMTBPE
from fairseq.file_io import PathManager
from torch import Tensor

from fairseq_plugins.common.files import count_lines
from fairseq_plugins.common.text import segment
from fairseq_plugins.repairs.wrapping import programs, repair, replaced, wrap

logger = logging.getLogger(__name__)


def open_text(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
    """Open a file so that only a line feed ends a line of text."""
    return open(file, mode, *args, **(options if "b" in mode else {"newline": "\n", **options}))  # noqa: PTH123


@repair
def end_lines_at_line_feeds() -> None:
    """Split texts into lines only at line feeds; fairseq misaligns all pairs after a carriage return inside a line."""
    for module in (file_chunker_utils, indexed_dataset, *programs("preprocess")):
        module.open = open_text


@wrap("preprocess", "main")
def refuse_misaligned_texts(main: Any, args: Namespace) -> None:
    """Refuse empty or misaligned texts before ``fairseq-preprocess`` writes anything."""
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


@wrap(Dictionary, "add_from_file")
def name_bad_dictionaries(add: Any, self: Any, f: Any) -> None:
    """Name the file in the error if fairseq cannot read a dictionary, or if a dictionary has no words."""
    if not isinstance(f, str):  # fairseq's own method calls itself with an open file
        add(self, f)
        return
    before = len(self)
    try:
        add(self, f)
        fault = "the dictionary has no words" if len(self) == before else None
        if self[before].startswith("\ufeff"):
            fault = "line 1 begins with a byte order mark, which would become part of the word"
    except OSError:
        raise
    except Exception as error:  # fairseq raises three kinds of errors
        fault = str(error)
    if fault is not None:
        raise ValueError(f"{f}: {fault}; restore the training's dictionary, or make one with fairseq-preprocess")


@wrap(SentencepieceBPE, "decode")
def decode_pieces_with_their_model(_: Any, self: Any, x: str) -> str:
    """Decode ``--bpe sentencepiece`` with sentencepiece itself; fairseq prints byte tokens such as ``<0xC3> <0xA4>``.

    fairseq also drops spaces at both ends of a line.  Line feeds become spaces, so that each translation is one line.
    """
    return str(self.sp.decode(x.split(" "))).replace("\n", " ")


@wrap(SubwordNMTBPE, "encode")
def segment_long_words(_: Any, self: Any, x: str) -> str:
    """Split long words before subword_nmt segments them (``--bpe``); a word of 100 000 letters would take minutes."""
    return segment(self.bpe, x)


@wrap("interactive", "buffered_read")
def read_every_line(_: Any, path: str, buffer_size: int) -> Iterator[list[str]]:
    """In ``fairseq-interactive``, accept invalid UTF-8, at which fairseq crashes; split lines at line feeds only."""
    with contextlib.nullcontext(sys.stdin.buffer) if path == "-" else Path(path).open("rb") as lines:
        texts = decode(lines)
        while buffer := list(itertools.islice(texts, buffer_size)):
            yield buffer


def decode(lines: Iterable[bytes]) -> Iterator[str]:
    """Decode lines and remove byte order marks; replace invalid UTF-8, with a warning for the first invalid line."""
    reported = False
    for number, line in enumerate(lines, 1):
        text = line.decode("utf-8", errors="replace")
        if not reported and (reported := text.encode() != line):
            logger.warning(f"line {number} is not UTF-8: \ufffd replaces invalid bytes, here and in later lines")
        yield text.rstrip("\r\n").removeprefix("\ufeff")


@wrap("interactive", "make_batches")
def cut_long_lines(
    make_batches: Any, lines: list[str], cfg: Any, task: Any, max_positions: Any, encode_fn: Callable[[str], str]
) -> Iterator[Any]:
    """Truncate lines that are too long in ``fairseq-interactive``, with a warning; fairseq crashes at these lines.

    Empty constraints are removed, because fairseq's search crashes at an empty constraint.  The task's cached
    batches are freed after the translation of their lines.
    """
    if cfg.generation.constraints:
        parts = (line.split("\t") for line in lines)
        lines = ["\t".join([text, *filter(str.strip, constraints)]) for text, *constraints in parts]
    longest = utils.resolve_max_positions(max_positions, cfg.dataset.max_tokens)
    longest = longest[0] if isinstance(longest, tuple) else longest
    tokenize, before = task.get_interactive_tokens_and_lengths, vars(task).get("lines_read", 0)

    def tokenize_and_cut(lines: list[str], encode: Callable[[str], str]) -> tuple[list[Tensor], list[int]]:
        tokens, lengths = tokenize(lines, encode)
        for place, length in enumerate(lengths):
            if longest is not None and length > longest:
                logger.warning(
                    f"line {before + place + 1} has {length} tokens: only the first {longest - 1} are translated"
                )
                tokens[place] = torch.cat([tokens[place][: longest - 1], tokens[place][-1:]])
                lengths[place] = longest
        return tokens, lengths

    with replaced(task, "get_interactive_tokens_and_lengths", tokenize_and_cut):
        yield from make_batches(lines, cfg, task, max_positions, encode_fn)
    task.dataset_to_epoch_iter.clear()
    task.lines_read = before + len(lines)
