"""What fairseq-generate and fairseq-interactive print: the n-best list of each sentence.

For each sentence there are a line S (source) and perhaps one T (reference), and for each hypothesis the lines H (score
and words), D (score and detokenised text) and P (the scores of its tokens).  All else, as the log, is passed over.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

__all__ = ["LARGEST", "Hypothesis", "Sentence", "read_generated"]

LARGEST = 10  # length penalty; powers of lengths have limits


@dataclass(frozen=True)
class Hypothesis:
    """One translation of a sentence.

    Attributes:
        words: the text as it was generated, but for ``--remove-bpe``.
        text: the same, detokenised where fairseq was told how.
        log_probability: log p(words | source) in nats, to 4 decimals per token.
        length: number of tokens generated, the end of the sentence included.
    """

    words: str
    text: str
    log_probability: float
    length: int

    def score(self, lenpen: float) -> float:
        """What fairseq compares hypotheses by: log p(y|x) / |y|^lenpen, in nats."""
        return self.log_probability / self.length**lenpen


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


def read_generated(paths: Iterable[Path]) -> list[Sentence]:
    """The sentences of all files, by number.

    Raises:
        ValueError: a file is cut off, has lost lines or holds no translations, or a sentence comes twice.
        OSError: a file cannot be read.
    """
    found: dict[int, Sentence] = {}
    for path in paths:
        for number, lines in groupby(_read_lines(path), key=lambda line: line.number):
            sentence = _read_sentence(list(lines))
            if found.setdefault(number, sentence) is not sentence:
                raise ValueError(f"{path}: sentence {number} comes a second time")
    if not found:
        raise ValueError(f"{', '.join(map(str, paths))}: no translations there; fairseq prints none with --quiet")
    return [found[number] for number in sorted(found)]


def _read_lines(path: Path) -> Iterator[_Line]:
    # Text may hold any other character that Python takes for the end of a line; at its end a carriage return belongs
    # to the line's.
    with path.open(encoding="utf-8", newline="\n") as lines:
        for count, line in enumerate(lines, start=1):
            if match := re.fullmatch(r"([STHDP])-(\d+)\t([^\n]*?)\r?(\n?)", line):
                kind, number, text, end = match.groups()
                if not end:
                    raise ValueError(f"{path}, line {count}: the file is cut off")
                yield _Line(f"{path}, line {count}", kind, int(number), text)


def _read_sentence(lines: Sequence[_Line]) -> Sentence:
    reference = next((line.text for line in lines if line.kind == "T"), None)
    hypotheses = [line for line in lines if line.kind in "HDP"]
    if not hypotheses or [line.kind for line in hypotheses] != ["H", "D", "P"] * (len(hypotheses) // 3):
        raise ValueError(
            f"{lines[-1].place}: sentence {lines[-1].number} ends without all lines H, D, P of a hypothesis"
        )
    triples = zip(hypotheses[::3], hypotheses[1::3], hypotheses[2::3], strict=True)
    return Sentence(lines[0].number, reference, [_read_hypothesis(*triple) for triple in triples])


def _read_hypothesis(words: _Line, text: _Line, positions: _Line) -> Hypothesis:
    try:
        scores = [float(score) for score in positions.text.split()]
        if any(map(math.isnan, scores)):
            raise ValueError("a score is not a number")
    except ValueError as error:
        raise ValueError(f"{positions.place}: {error}") from None
    hypothesis = Hypothesis(
        words=words.text.partition("\t")[2],
        text=text.text.partition("\t")[2],
        log_probability=math.fsum(scores) * math.log(2),
        length=len(scores),
    )
    # A word may hold other blanks than the one between words, as a no-break space.
    if len(scores) <= len(list(filter(None, hypothesis.words.split(" ")))):  # the end of the sentence has one too
        raise ValueError(f"{positions.place}: fewer scores than {words.place} has tokens")
    return hypothesis
