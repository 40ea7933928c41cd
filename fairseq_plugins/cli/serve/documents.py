"""Texts and their sentences, uploaded files (plain text and gettext catalogues), and translated files for download."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from fairseq_plugins.cli import catalogues

FORMATS = [".txt", catalogues.SUFFIX]
KEPT = 16_000_000  # maximum number of bytes of all translated files in memory
# Matches possible ends of sentences: line ends, punctuation followed by whitespace, and Chinese or Japanese
# punctuation, which needs no whitespace. The lookbehind makes the search take linear time.
_BOUNDARY = re.compile(r"\n\s*|(?<![.!?…])[.!?…]+[\"'”’»)\]]*\s+|[。！？]+[”』」）]*\s*")
_OPENING = "\"'“„«([¿¡"
_ABBREVIATIONS = {"bzw", "ca", "dr", "fig", "inkl", "mr", "mrs", "ms", "nr", "prof", "st", "usw", "vgl", "vs", "zzgl"}


class Sentence(NamedTuple):
    """A sentence with surrounding whitespace; the sentence is empty if the text has only whitespace."""

    before: str
    text: str
    after: str


def split(text: str) -> list[Sentence]:
    """Return the sentences of a text; their concatenation, with the whitespace between them, is the text."""
    starts = [0, *(match.end() for match in _BOUNDARY.finditer(text) if _is_end(text, match)), len(text)]
    return [_between_spaces(text[start:end]) for start, end in pairwise(starts) if start < end]


def _is_end(text: str, match: re.Match[str]) -> bool:
    """Return whether a match of `_BOUNDARY` ends a sentence.

    Line ends and Chinese or Japanese punctuation always end a sentence.  Other punctuation does not end a sentence
    before a lower-case letter, and a full stop does not end a sentence after an abbreviation or an ordinal.
    """
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


@dataclass(frozen=True)
class Document:
    """A file to translate; ``fill`` gets translations of the texts, and returns the translated file and a report."""

    name: str  # file name without a folder
    texts: list[str]  # distinct texts to translate
    fill: Callable[[Mapping[str, str]], tuple[bytes, str]]

    def sentences(self) -> list[str]:
        """Return the distinct sentences of all texts."""
        return [*dict.fromkeys(each.text for text in self.texts for each in split(text) if each.text)]

    def translated(self, translations: Mapping[str, str]) -> tuple[bytes, str]:
        """Return the translated file and a report, given the translations of all `sentences`."""
        translations = {**translations, "": ""}
        joined = (
            "".join(each.before + translations[each.text] + each.after for each in split(text)) for text in self.texts
        )
        return self.fill(dict(zip(self.texts, joined, strict=True)))


def read_document(name: str, content: bytes) -> Document:
    """Read an uploaded file.

    Raises:
        ValueError: the file is neither text in UTF-8 nor a gettext catalogue.
    """
    if name.lower().endswith(catalogues.SUFFIX):
        return _read_catalogue(name, content)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise ValueError(f"{name}: neither text in UTF-8 nor a gettext catalogue (.po); convert it to UTF-8 text")
    return Document(name, [text], lambda translations: (translations[text].encode(), ""))


def _read_catalogue(name: str, content: bytes) -> Document:
    with TemporaryDirectory() as folder:  # polib.pofile(text) would open a file whose name equals the text
        path = Path(folder, "catalogue.po")
        path.write_bytes(content)
        try:
            catalogue = catalogues.load(path)
        except ValueError as error:
            raise ValueError(str(error).replace(str(path), name)) from None
    gaps = catalogues.gaps(catalogue)

    def fill(translations: Mapping[str, str]) -> tuple[bytes, str]:
        for gap in gaps:
            gap.fill(translations)
        return catalogues.in_utf8(catalogue), catalogues.report(Path(name), gaps)

    return Document(name, [*dict.fromkeys(line for gap in gaps for line in gap.lines())], fill)


class Results:
    """The newest translated files, in memory."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}

    def add(self, name: str, content: bytes) -> str:
        """Keep a file, and return an unguessable name for its download."""
        key = f"{secrets.token_urlsafe(16)}.{name}"
        self._files[key] = content
        while sum(map(len, self._files.values())) > KEPT and len(self._files) > 1:
            del self._files[next(iter(self._files))]
        return key

    def get(self, key: str) -> bytes | None:
        """Return a file, or None if newer files have replaced it."""
        return self._files.get(key)
