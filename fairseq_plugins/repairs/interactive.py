"""What ``fairseq-interactive`` does with its lines: each gets its translation, whatever is in it, however many come."""

from __future__ import annotations

import contextlib
import inspect
import io
import itertools
import logging
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.data.encoders.subword_nmt_bpe import SubwordNMTBPE
from torch import Tensor

from fairseq_plugins.common.long_words import segment
from fairseq_plugins.common.replaced import replaced
from fairseq_plugins.repairs.wrapping import in_place_of

logger = logging.getLogger(__name__)


def translate_every_line() -> None:
    """fairseq ends at a line that is no UTF-8 or too long, takes a carriage return for the end of a line, keeps all
    that it has read, and cannot print soft alignments.

    Its program may have been started as a script or as a module.
    """
    for name in ("fairseq_cli.interactive", "__main__"):
        program: Any = sys.modules.get(name)
        if not hasattr(program, "buffered_read") or not hasattr(program, "make_batches"):
            continue
        if not reads_every_line(program.buffered_read):
            program.buffered_read = buffered_read
        if not cuts_long_lines(program.make_batches):
            cut_long_lines(program)
        if prints_pairs_only(program.main):
            refuse_options_of_generate(program)


def reads_every_line(read: Callable[[str, int], Iterator[list[str]]]) -> bool:
    """Probe: whether ``read`` finds the lines of an input that is not all text."""
    with replaced(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\rb\n\xff\n\n"), "utf-8")):
        try:
            return len(next(read("-", 9))) == 3
        except UnicodeDecodeError:
            return False


def buffered_read(path: str, buffer_size: int) -> Iterator[list[str]]:
    """The lines of a file, or of the standard input where it is called ``-``, so many at once.

    Only a line feed ends a line, what is not UTF-8 becomes a replacement character, and a byte order mark goes.
    """
    with contextlib.nullcontext(sys.stdin.buffer) if path == "-" else Path(path).open("rb") as lines:
        texts = decode(lines)
        while buffer := list(itertools.islice(texts, buffer_size)):
            yield buffer


def decode(lines: Iterable[bytes]) -> Iterator[str]:
    """Lines as text; of the first that is not UTF-8 the user is told."""
    told = False
    for number, line in enumerate(lines, 1):
        text = line.decode("utf-8", errors="replace")
        if not told and (told := text.encode() != line):
            logger.warning(f"line {number} is not UTF-8, and others may not be: \ufffd stands for what is none")
        yield text.rstrip("\r\n").removeprefix("\ufeff")


def print_every_letter() -> None:
    """fairseq's programs end at the first letter that the encoding of the standard output has not.

    It is printed as its number.  The probe is what Python does with such letters there.
    """
    programs = [sys.modules.get(name) for name in ("fairseq_cli.generate", "fairseq_cli.interactive", "__main__")]
    if not any(hasattr(program, "cli_main") for program in programs):
        return
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def takes_long_words(encode: Callable[..., str]) -> bool:
    """Probe: whether byte pair encoding gets a word of a thousand letters at once."""
    return encode(SimpleNamespace(bpe=SimpleNamespace(process_line=str, separator="@@")), "a" * 1000) == "a" * 1000


def segment_long_words() -> None:
    """``--bpe subword_nmt`` takes minutes for a word of a hundred thousand letters, of which few are translated."""
    if takes_long_words(SubwordNMTBPE.encode):
        SubwordNMTBPE.encode = lambda self, line: segment(self.bpe, line)


def cuts_long_lines(make_batches: Callable[..., Iterator[Any]]) -> bool:
    """Probe: whether ``make_batches`` makes a line of three tokens one of two, where the model takes no more."""
    sizes: list[int] = []

    def get_batch_iterator(dataset: list[Tensor], **_: object) -> Any:
        sizes.extend(map(len, dataset))
        return SimpleNamespace(next_epoch_itr=lambda shuffle: [])

    task = SimpleNamespace(
        get_interactive_tokens_and_lengths=lambda *_: ([torch.tensor([4, 5, 2])], [3]),
        build_dataset_for_inference=lambda tokens, lengths, constraints: tokens,
        get_batch_iterator=get_batch_iterator,
        dataset_to_epoch_iter={},
    )
    dataset = Namespace(max_tokens=None, batch_size=1, skip_invalid_size_inputs_valid_test=False)
    cfg = Namespace(dataset=dataset, generation=Namespace(constraints=None))
    list(make_batches(["a b"], cfg, task, (2, 2), str))
    return sizes == [2]


def cut_long_lines(program: Any) -> None:
    """The batches of a buffer of lines, those that are too long for the model or a batch without their last words.

    Of each the user is told.  Empty constraints, at which fairseq's search fails, are none.  The task lets go of a
    buffer when it has been translated.
    """
    make_batches, before = program.make_batches, 0  # lines of earlier buffers

    @in_place_of(program, "make_batches")
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


def prints_pairs_only(main: Callable[..., None]) -> bool:
    """Probe: whether ``main`` knows alignments of words to words, and none of probabilities."""
    return "soft" not in inspect.unwrap(main).__code__.co_consts


def refuse_options_of_generate(program: Any) -> None:
    """It says at once what it cannot do; fairseq's ends after the first line, or does not do it."""
    main = program.main

    @in_place_of(program, "main")
    def refuse_and_run(cfg: Any, **options: Any) -> None:
        if cfg.generation.print_alignment == "soft":
            raise ValueError("--print-alignment soft: fairseq-generate prints it; fairseq-interactive only hard ones")
        main(cfg, **options)
