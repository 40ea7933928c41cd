"""Words of many thousand letters, which byte pair encoding takes minutes for: it learns nothing from them, and gets
them in pieces."""

from __future__ import annotations

from typing import Any

LONGEST = 500  # letters


def without_long_words(line: str) -> str:
    """What subwords are learned from."""
    return line if len(line) <= LONGEST else " ".join(word for word in line.split(" ") if len(word) <= LONGEST)


def segment(bpe: Any, line: str) -> str:
    """What subword-nmt makes of a line; taken together, the subwords of a word are the word also where it is long."""
    if len(line) <= LONGEST:
        return str(bpe.process_line(line))
    pieces = ([word[at : at + LONGEST] for at in range(0, len(word), LONGEST)] for word in line.split(" "))
    return " ".join(f"{bpe.separator} ".join(map(bpe.process_line, parts)) for parts in pieces)
