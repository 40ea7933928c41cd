"""gettext catalogues (``.po``): pairs to learn from, and entries to fill."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import polib

from fairseq_plugins.cli.own_data.parallel_text import Pair

SUFFIX = ".po"


def load(path: Path) -> polib.POFile:
    """Parse a catalogue.

    Raises:
        ValueError: it is not one, or not in the encoding that it names.
    """
    try:
        return polib.pofile(str(path))
    except (OSError, UnicodeDecodeError, LookupError) as error:  # polib's errors of syntax are OSErrors
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ValueError(f"{path} is not a gettext catalogue: {error}") from error


def read_catalogue(path: Path) -> Iterator[Pair]:
    """Read the translated entries; obsolete ones and those marked fuzzy are left out."""
    for entry in load(path):
        if entry.translated() and not entry.obsolete:
            if entry.msgid_plural:
                forms = [entry.msgstr_plural[number] for number in sorted(entry.msgstr_plural)]
                pairs = [(entry.msgid, forms[0]), (entry.msgid_plural, forms[-1])]
            else:
                pairs = [(entry.msgid, entry.msgstr)]
            yield from ((on_one_line(source), on_one_line(target)) for source, target in pairs)


def on_one_line(text: str) -> str:
    """Return the text with its line feeds as spaces."""
    return " ".join(text.split("\n"))


def language_of_catalogue(path: Path) -> str | None:
    """Return the language of the translations, as the catalogue's header tells it; ``pt-BR`` for ``pt_BR``."""
    return load(path).metadata.get("Language", "").replace("_", "-") or None
