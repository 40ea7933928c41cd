"""Of what kind a model's subwords are."""

from __future__ import annotations

from collections.abc import Sequence


def bpe_symbol(words: Sequence[str]) -> str | None:
    """fairseq's name of how subwords are told, by what a dictionary has most.

    Returns:
        ``subword_nmt`` (words that end with ``@@``), ``sentencepiece`` (pieces that begin with ``▁``), or None.
    """
    marked = {
        "subword_nmt": sum(word.endswith("@@") for word in words),
        "sentencepiece": sum(word.startswith("\u2581") for word in words),
    }
    name = max(marked, key=lambda name: marked[name])
    return name if marked[name] else None
