"""Parser for the output of fairseq-generate and fairseq-interactive: the n-best list of each sentence.

The output has a line S (source) and optionally a line T (reference) for each sentence.  Each hypothesis has the lines
H (score and words), D (score and detokenised text), P (token scores) and, with ``--print-alignment``, A.  Other lines
are skipped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from fairseq_plugins.cli import parallel_text
from fairseq_plugins.common.files import decoded


@dataclass(frozen=True)
class Hypothesis:
    """One translation of a sentence.

    Attributes:
        words: generated words, after ``--remove-bpe``.
        text: detokenised text.
        log_probability: log p(words | source) in nats, computed from token scores that fairseq rounds to 4 decimals.
        length: number of generated tokens, including the end of the sentence.
    """

    words: str
    text: str
    log_probability: float
    length: int

    def score(self, lenpen: float, word_penalty: float = 0.0) -> float:
        """Return the ranking score in nats: (log p(y|x) + word_penalty (|y| - 1)) / |y|^lenpen."""
        return (self.log_probability + word_penalty * (self.length - 1)) / self.length**lenpen


@dataclass(frozen=True)
class Sentence:
    """Number, optional reference and hypotheses (at least one) of a sentence."""

    number: int
    reference: str | None
    hypotheses: list[Hypothesis]


class _Line(NamedTuple):
    place: str
    kind: str
    number: int
    text: str


def read_generated(paths: Iterable[Path]) -> list[Sentence]:
    """Read the sentences of all files, sorted by number."""
    found: dict[int, Sentence] = {}
    for path in paths:
        for number, lines in groupby(_read_lines(path), key=lambda line: line.number):
            sentence = _read_sentence(list(lines))
            if found.setdefault(number, sentence) is not sentence:
                raise ValueError(
                    f"{path}: sentence {number} is repeated; make shards with --distributed-world-size and "
                    "--distributed-rank, because --num-shards has no effect"
                )
    if not found:
        raise ValueError(f"{', '.join(map(str, paths))}: no translations found; run fairseq-generate without --quiet")
    return [found[number] for number in sorted(found)]


def lines_of(path: Path, sentences: Sequence[Sentence]) -> list[str]:
    """Read a file that has one line for each sentence."""
    text = list(parallel_text.read_text(path, ""))
    if len(text) != len(sentences):
        raise ValueError(
            f"{path} has {len(text)} lines for {len(sentences)} translated sentences: give the matching file"
        )
    for number, sentence in enumerate(sentences):
        if sentence.number != number:
            raise ValueError(
                f"{path} has {len(text)} lines, but sentence {number} has no translation: translate all lines"
            )
    return text


def _read_lines(path: Path) -> Iterator[_Line]:
    # Lines are read as bytes, because Python's text mode would also end a line at a carriage return within a sentence.
    # A carriage return before the line feed is dropped.
    with path.open("rb") as file:
        for count, line in enumerate(decoded(file, path), start=1):
            if match := re.fullmatch(r"([STHDPA])-([0-9]{1,18})\t([^\n]*?)\r?(\n?)", line):
                kind, number, text, end = match.groups()
                if not end:
                    raise ValueError(f"{path}, line {count}: the file is truncated; run fairseq-generate again")
                yield _Line(f"{path}, line {count}", kind, int(number), text)


def _read_sentence(lines: Sequence[_Line]) -> Sentence:
    if not re.fullmatch("[ST]*(HDPA?)+", "".join(line.kind for line in lines)):
        raise ValueError(
            f"{lines[-1].place}: sentence {lines[-1].number} lacks a line H, D or P; run fairseq-generate again"
        )
    words, texts, scores = ([line for line in lines if line.kind == kind] for kind in "HDP")
    hypotheses = []
    for word_line, text_line, score_line in zip(words, texts, scores, strict=True):
        try:
            values = [float(score) for score in score_line.text.split()]
        except ValueError as error:
            raise ValueError(f"{score_line.place}: {error}; run fairseq-generate again") from None
        if not values or not math.isfinite(sum(values)):
            raise ValueError(f"{score_line.place}: scores are missing or infinite; run fairseq-generate again")
        log_probability = math.fsum(values) * math.log(2)
        plain_words, text = (line.text.partition("\t")[2] for line in (word_line, text_line))
        hypotheses.append(Hypothesis(plain_words, text, log_probability, len(values)))
    reference = next((line.text for line in lines if line.kind == "T"), None)
    return Sentence(lines[0].number, reference, hypotheses)
