"""Functions that detect a model's subword scheme, and that segment text with words of any length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LONGEST = 500  # characters; subword-nmt needs minutes for a word of many thousands of characters


def bpe_symbol(words: Sequence[str]) -> str | None:
    """Return fairseq's name for the subword scheme of a dictionary's words.

    Returns:
        ``subword_nmt`` (words that end with ``@@``), ``sentencepiece`` (pieces that begin with ``▁``), or None.
    """
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
