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
from fairseq import file_chunker_utils
from fairseq.data import Dictionary, indexed_dataset
from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE
from fairseq.data.encoders.subword_nmt_bpe import SubwordNMTBPE
from fairseq.file_io import PathManager
from torch import Tensor

from fairseq_plugins.common.files import count_lines
from fairseq_plugins.common.text import segment
from fairseq_plugins.repairs.wrapping import programs, wrap

logger = logging.getLogger(__name__)


def open_text(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
    """Open a file so that only a line feed ends a line of text."""
    return open(file, mode, *args, **(options if "b" in mode else {"newline": "\n", **options}))  # noqa: PTH123


def end_lines_at_line_feeds() -> None:
    """Split texts into lines only at line feeds; fairseq misaligns all pairs after a carriage return inside a line.

    No probe is needed: files without carriage returns are read as before.
    """
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


def name_bad_dictionaries() -> None:
    """Refuse a dictionary that fairseq cannot read, or that has no words, with the name of its file.

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
            fault = "the dictionary has no words" if len(self) == before else None
            if self[before].startswith("\ufeff"):
                fault = "line 1 begins with a byte order mark, which would become part of the word"
        except OSError:
            raise
        except Exception as error:  # fairseq raises three kinds of errors
            fault = str(error)
        if fault is not None:
            raise ValueError(f"{f}: {fault}; restore the training's dictionary, or make one with fairseq-preprocess")


def decode_pieces_with_their_model() -> None:
    """Decode ``--bpe sentencepiece`` by the sentencepiece model; fairseq prints byte tokens such as ``<0xC3> <0xA4>``.

    fairseq also drops spaces at both ends of a line.  This repair turns line feeds into spaces, so that each
    translation is one line.  No probe is needed: the sentencepiece model always decodes correctly.
    """

    @wrap(SentencepieceBPE, "decode")
    def decode(self: Any, x: str) -> str:
        return str(self.sp.decode(x.split(" "))).replace("\n", " ")


def segment_long_words() -> None:
    """Split long words before ``--bpe subword_nmt``, which needs minutes for a word of 100 000 letters.

    No probe is needed: short words are segmented as before.
    """

    @wrap(SubwordNMTBPE, "encode")
    def encode(self: Any, x: str) -> str:
        return segment(self.bpe, x)


def translate_every_line() -> None:
    """Accept invalid UTF-8, carriage returns and long lines in ``fairseq-interactive``, and free translated lines.

    fairseq crashes at a line that is invalid UTF-8 or too long, splits lines at carriage returns, and keeps all lines
    in memory.  No probe is needed: other lines are read as before.
    """
    for program in programs("interactive", "buffered_read"):
        program.buffered_read = buffered_read
        cut_long_lines(program)


def buffered_read(path: str, buffer_size: int) -> Iterator[list[str]]:
    """Yield the lines of a file, or of the standard input if it is called ``-``, in lists of ``buffer_size``."""
    with contextlib.nullcontext(sys.stdin.buffer) if path == "-" else Path(path).open("rb") as lines:
        texts = decode(lines)
        while buffer := list(itertools.islice(texts, buffer_size)):
            yield buffer


def decode(lines: Iterable[bytes]) -> Iterator[str]:
    """Decode lines and remove byte order marks; replace invalid UTF-8, with a warning for the first such line."""
    reported = False
    for number, line in enumerate(lines, 1):
        text = line.decode("utf-8", errors="replace")
        if not reported and (reported := text.encode() != line):
            logger.warning(f"line {number} is not UTF-8: \ufffd replaces invalid bytes, here and in later lines")
        yield text.rstrip("\r\n").removeprefix("\ufeff")


def cut_long_lines(program: Any) -> None:
    """Truncate lines that are too long for the model or a batch, with a warning for each.

    Empty constraints are removed, because fairseq's search crashes at them.  Each buffer is freed after its
    translation.
    """
    make_batches, before = program.make_batches, 0  # number of lines in earlier buffers

    @wrap(program, "make_batches")
    def batches(
        lines: list[str], cfg: Any, task: Any, max_positions: Any, encode_fn: Callable[[str], str]
    ) -> Iterator[Any]:
        nonlocal before
        if cfg.generation.constraints:
            parts = (line.split("\t") for line in lines)
            lines = ["\t".join([text, *filter(str.strip, constraints)]) for text, *constraints in parts]
        limits = [max_positions[0] if isinstance(max_positions, tuple) else max_positions, cfg.dataset.max_tokens]
        longest = min((limit for limit in limits if isinstance(limit, int)), default=None)
        tokenize = task.get_interactive_tokens_and_lengths

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

        task.get_interactive_tokens_and_lengths = tokenize_and_cut
        try:
            yield from make_batches(lines, cfg, task, max_positions, encode_fn)
        finally:
            task.get_interactive_tokens_and_lengths = tokenize
            task.dataset_to_epoch_iter.clear()
        before += len(lines)
