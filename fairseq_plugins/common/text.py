"""Subwords and ROUGE: a model's subword scheme, segmentation of words of any length, and rouge-score."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

LONGEST = 500  # characters; subword-nmt needs minutes for a word of many thousands of characters


def bpe_symbol(words: Sequence[str]) -> str | None:
    """Return fairseq's name for the subword scheme of a dictionary's words, or None without subwords."""
    marked = {
        "subword_nmt": sum(word.endswith("@@") for word in words),
        "sentencepiece": sum(word.startswith("\u2581") for word in words),
    }
    name = max(marked, key=lambda name: marked[name])
    return name if marked[name] else None


def without_long_words(line: str) -> str:
    """Remove words that are too long to learn subwords from."""
    return line if len(line) <= LONGEST else " ".join(word for word in line.split(" ") if len(word) <= LONGEST)


def segment(bpe: Any, line: str) -> str:
    """Segment a line with subword-nmt, after splitting long words into parts."""
    if len(line) <= LONGEST:
        return str(bpe.process_line(line))
    pieces = ([word[at : at + LONGEST] for at in range(0, len(word), LONGEST)] for word in line.split(" "))
    return " ".join(f"{bpe.separator} ".join(map(bpe.process_line, parts)) for parts in pieces)


def rouge_scorer(names: Sequence[str]) -> Any:
    """Return rouge-score's scorer with stemming."""
    try:
        from rouge_score.rouge_scorer import RougeScorer  # noqa: PLC0415 (an optional dependency)
    except ImportError as error:
        raise ValueError("ROUGE needs the package rouge-score: pip install rouge-score") from error
    return RougeScorer(names, use_stemmer=True)


def can_score(words: Collection[str]) -> bool:
    """Return whether rouge-score, which reads only a to z and digits, can read at least a tenth of the words."""
    return sum(bool(re.search("[a-z0-9]", word.lower())) for word in words) >= len(words) / 10
