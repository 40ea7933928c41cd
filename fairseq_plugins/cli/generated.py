"""What fairseq-generate and fairseq-interactive print: the n-best list of each sentence.

For each sentence there are a line S (source) and perhaps one T (reference), and for each hypothesis the lines H (score
and words), D (score and detokenised text), P (the scores of its tokens) and, with ``--print-alignment``, A.  All else,
as the log, is passed over.
"""

from __future__ import annotations

import math
import re
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from fairseq_plugins.cli.own_data import parallel_text
from fairseq_plugins.common.files import decoded

LARGEST = 10  # length penalty; powers of lengths have limits


@dataclass(frozen=True)
class Hypothesis:
    """One translation of a sentence.

    Attributes:
        words: the text as it was generated, but for ``--remove-bpe``.
        text: the same, detokenised where fairseq was told how.
        log_probability: log p(words | source) in nats, to 4 decimals per token.
        length: number of tokens generated, the end of the sentence included.
        alignment: of each word, the source word that it attends to most; None where fairseq was not asked for it.
    """

    words: str
    text: str
    log_probability: float
    length: int
    alignment: list[int] | None

    def score(self, lenpen: float, word_penalty: float = 0.0) -> float:
        """What hypotheses are compared by, in nats: (log p(y|x) + a penalty for each word but the end) / |y|^lenpen."""
        return (self.log_probability + word_penalty * (self.length - 1)) / self.length**lenpen


@dataclass(frozen=True)
class Sentence:
    """A sentence's number, its reference where there is one, and its hypotheses, at least one."""

    number: int
    reference: str | None
    hypotheses: list[Hypothesis]


@dataclass(frozen=True)
class _Line:
    place: str
    kind: str
    number: int
    text: str


def add_generated(parser: ArgumentParser, made_by: str, more: str = "") -> None:
    """The argument of tools that read what a command, with these options, has printed."""
    parser.add_argument(
        "generated", nargs="+", type=Path, metavar="GENERATED", help=f"output of {made_by}, or of its shards{more}"
    )


def read_generated(paths: Iterable[Path]) -> list[Sentence]:
    """The sentences of all files, by number.

    Raises:
        ValueError: a file is not UTF-8, cut off, has lost lines or holds no translations, or a sentence comes twice.
        OSError: a file cannot be read.
    """
    found: dict[int, Sentence] = {}
    for path in paths:
        for number, lines in groupby(_read_lines(path), key=lambda line: line.number):
            sentence = _read_sentence(list(lines))
            if found.setdefault(number, sentence) is not sentence:
                raise ValueError(
                    f"{path}: sentence {number} comes a second time (shards are made with --distributed-world-size and "
                    "--distributed-rank; --num-shards does nothing)"
                )
    if not found:
        raise ValueError(f"{', '.join(map(str, paths))}: no translations there; fairseq prints none with --quiet")
    return [found[number] for number in sorted(found)]


def lines_of(path: Path, sentences: Sequence[Sentence]) -> list[str]:
    """The lines of a file.

    Raises:
        ValueError: there is not one for each sentence, in order, or one is not UTF-8.
        OSError: the file cannot be read.
    """
    text = list(parallel_text.read_text(path, ""))
    if len(text) != len(sentences):
        raise ValueError(f"{path} has {len(text)} lines, and {len(sentences)} sentences were translated")
    for number, sentence in enumerate(sentences):
        if sentence.number != number:
            raise ValueError(f"{path} has {len(text)} lines, and sentence {number} was not translated")
    return text


def _read_lines(path: Path) -> Iterator[_Line]:
    # Text may hold any other character that Python takes for the end of a line; at its end a carriage return belongs
    # to the line's.
    with path.open("rb") as file:
        for count, line in enumerate(decoded(file, path), start=1):
            if match := re.fullmatch(r"([STHDPA])-([0-9]{1,18})\t([^\n]*?)\r?(\n?)", line):
                kind, number, text, end = match.groups()
                if not end:
                    raise ValueError(f"{path}, line {count}: the file is cut off")
                yield _Line(f"{path}, line {count}", kind, int(number), text)


def _read_sentence(lines: Sequence[_Line]) -> Sentence:
    reference = next((line.text for line in lines if line.kind == "T"), None)
    kinds = "".join(line.kind for line in lines)
    if not re.fullmatch(r"[ST]*(HDPA?)+", kinds):
        raise ValueError(
            f"{lines[-1].place}: sentence {lines[-1].number} ends without all lines H, D, P of a hypothesis"
        )
    hypotheses = [_read_hypothesis(*lines[slice(*found.span())]) for found in re.finditer("HDPA?", kinds)]
    return Sentence(lines[0].number, reference, hypotheses)


def _read_hypothesis(words: _Line, text: _Line, positions: _Line, alignment: _Line | None = None) -> Hypothesis:
    try:
        scores = [float(score) for score in positions.text.split()]
        if any(map(math.isnan, scores)):
            raise ValueError("a score is not a number")
        log_probability = math.fsum(scores) * math.log(2)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{positions.place}: {error}") from None
    hypothesis = Hypothesis(
        words=words.text.partition("\t")[2],
        text=text.text.partition("\t")[2],
        log_probability=log_probability,
        length=len(scores),
        alignment=_read_alignment(alignment.text) if alignment else None,
    )
    # A word may hold other blanks than the one between words, as a no-break space.
    if len(scores) <= len(list(filter(None, hypothesis.words.split(" ")))):  # the end of the sentence has one too
        raise ValueError(f"{positions.place}: fewer scores than {words.place} has tokens")
    return hypothesis


def _read_alignment(text: str) -> list[int] | None:
    """Source words of ``source-target source-target ...``; None for a soft alignment, which is made of numbers."""
    pairs = [re.fullmatch(r"([0-9]{1,18})-[0-9]+", pair) for pair in text.split()]
    return None if None in pairs else [int(pair[1]) for pair in pairs if pair]
