"""Split texts into sentences."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import NamedTuple

# Matches line ends, punctuation that may end a sentence if whitespace follows, and punctuation that needs no
# whitespace. The lookbehind makes the search take linear time.
_BOUNDARY = re.compile(r"\n\s*|(?<![.!?…])[.!?…]+[\"'”’»)\]]*\s+|[。！？]+[”』」）]*\s*")
_OPENING = "\"'“„«([¿¡"
_ABBREVIATIONS = {"bzw", "ca", "dr", "fig", "inkl", "mr", "mrs", "ms", "nr", "prof", "st", "usw", "vgl", "vs", "zzgl"}


class Sentence(NamedTuple):
    """A sentence with surrounding whitespace; the sentence is empty if the text has only whitespace."""

    before: str
    text: str
    after: str


def split(text: str) -> list[Sentence]:
    """Return the sentences of a text; sentences and their whitespace, concatenated, are the text."""
    starts = [0, *(match.end() for match in _BOUNDARY.finditer(text) if _is_end(text, match)), len(text)]
    return [_between_spaces(text[start:end]) for start, end in pairwise(starts) if start < end]


def _is_end(text: str, match: re.Match[str]) -> bool:
    """Return whether a sentence ends at a match; it does not after abbreviations and ordinals, or before lower case."""
    marks = match[0].strip()
    if "\n" in match[0] or marks[:1] in "。！？":
        return True
    following = text[match.end() : match.end() + 2].lstrip(_OPENING)[:1]
    word = re.split(r"[^\w]", text[max(0, match.start() - 20) : match.start()])[-1]
    is_short = len(word) == 1 or word.lower() in _ABBREVIATIONS or (word.isdecimal() and len(word) <= 2)
    return not following.islower() and not (marks == "." and is_short)


def _between_spaces(chunk: str) -> Sentence:
    text = chunk.strip()
    before, _, after = chunk.partition(text) if text else ("", "", chunk)
    return Sentence(before, text, after)
