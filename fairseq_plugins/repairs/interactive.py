"""Repairs of ``fairseq-interactive``: it translates every line and prints every letter, in bounded memory."""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.data.encoders.subword_nmt_bpe import SubwordNMTBPE
from torch import Tensor

from fairseq_plugins.common.text import segment
from fairseq_plugins.repairs.wrapping import programs, wrap

logger = logging.getLogger(__name__)


def translate_every_line() -> None:
    """Accept invalid UTF-8, carriage returns and long lines, and free lines after their translation.

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


def print_every_letter() -> None:
    """Escape characters that the standard output cannot encode; fairseq's commands crash at them.

    The probe is the error handler of the output stream.
    """
    if not any(programs(command, "cli_main") for command in ("generate", "interactive")):
        return
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def takes_long_words(encode: Callable[..., str]) -> bool:
    """Probe: whether the BPE gets a word of 1000 letters as a whole."""
    return encode(SimpleNamespace(bpe=SimpleNamespace(process_line=str, separator="@@")), "a" * 1000) == "a" * 1000


def segment_long_words() -> None:
    """Split long words before ``--bpe subword_nmt``, which needs minutes for a word of 100 000 letters."""
    if takes_long_words(SubwordNMTBPE.encode):
        SubwordNMTBPE.encode = lambda self, line: segment(self.bpe, line)


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
