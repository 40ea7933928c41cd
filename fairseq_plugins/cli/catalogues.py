"""gettext catalogues (``.po``): translated pairs for training, and empty entries to fill."""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import polib

from fairseq_plugins.cli.parallel_text import Pair

SUFFIX = ".po"
LINE = re.compile(r"\S(?:.*\S)?")  # matches a line without the white space at its ends
SHOWN = 10  # maximum number of entries with wrong placeholders in a report
# Placeholders and markup that a translation must keep unchanged. Only the text in :role:`text <target>` may be
# translated. The pattern limits repetitions, so that a search takes linear time.
PLACEHOLDERS = re.compile(
    r"""%\([^()\s]+\)[#0+-]{0,5}[\d.]{0,9}[a-z]                              # %(name)s
    | (?<![\d%])%(?:\d{1,9}\$)?[#0+-]{0,5}\d{0,9}(?:\.\d{1,9})?(?:hh?|ll?|[jztLq])?[acdefgiorsux@]  # %s, %1$s, %.2f
    | ``.+?``                                                              # literal text
    | :[\w:+.-]{1,99}:`[^`]+`                                              # :role:`target`, :role:`text <target>`
    | \{[^{}\s]*\}                                                         # {name}, {0:>10}
    | https?://[\w/%?=&#~@+$.,:;!*-]*[\w/=&#~]
    | </?[a-z][^<>]*>                                                      # <b>
    | (?<!\w)\|[^|\s](?:[^|]*[^|\s])?\|(?!\w)                              # |substitution|
    """,
    re.VERBOSE | re.ASCII | re.IGNORECASE,
)


def load(path: Path) -> polib.POFile:
    """Parse a catalogue.

    Raises:
        ValueError: the file is not a catalogue, or cannot be decoded with its declared encoding.
    """
    try:
        return polib.pofile(str(path))
    except (OSError, UnicodeDecodeError, LookupError) as error:  # polib raises OSError for a syntax error
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ValueError(f"{path} is not a gettext catalogue: {error}; repair it or give another file") from error


def entries_of(catalogue: polib.POFile) -> Iterator[Pair]:
    """Yield the source and translation of each translated entry, except obsolete and fuzzy entries."""
    for entry in catalogue:
        if entry.translated() and not entry.obsolete:
            pairs = [(entry.msgid, entry.msgstr)]
            if entry.msgid_plural and entry.msgstr_plural:
                forms = [entry.msgstr_plural[number] for number in sorted(entry.msgstr_plural)]
                pairs = [(entry.msgid, forms[0]), (entry.msgid_plural, forms[-1])]
            yield from ((source.replace("\n", " "), target.replace("\n", " ")) for source, target in pairs)


def language_of(catalogue: polib.POFile) -> str | None:
    """Return the target language from the catalogue's header, in the form ``pt-BR``."""
    return catalogue.metadata.get("Language", "").replace("_", "-") or None


@dataclass(eq=False)
class Gap:
    """A missing translation of a catalogue's entry, or of a plural form of the entry."""

    entry: polib.POEntry
    source: str  # the text to translate
    form: int | None = None  # number of the plural form, if the entry has plural forms
    wrong: list[str] = field(default_factory=list)  # placeholders that the translation lost or added
    is_filled: bool = False

    @property
    def line(self) -> int:
        """Return the number of the entry's first line in the catalogue."""
        return max(int(self.entry.linenum), 1)

    def lines(self) -> list[str]:
        """Return the source's lines, stripped of white space; blank lines are omitted."""
        return LINE.findall(self.source)

    def fill(self, translations: Mapping[str, str]) -> None:
        """Insert translations of the source's lines, and mark the entry fuzzy.  White space around lines is kept.

        If the model returns no text, the entry stays empty.
        """
        translation = LINE.sub(lambda line: translations[line[0]].strip(), self.source)
        if not translation.strip():
            return
        self.is_filled = True
        before, after = placeholders(self.source), placeholders(translation)
        self.wrong = [f"lost {name}" for name in before - after] + [f"added {name}" for name in after - before]
        self.entry.fuzzy = True
        if self.form is None:
            self.entry.msgstr = translation
        else:
            self.entry.msgstr_plural[self.form] = translation


def gaps(catalogue: polib.POFile) -> list[Gap]:
    """Return a `Gap` for each empty translation; skip obsolete entries and entries without source text."""
    found = []
    for entry in catalogue:
        if entry.obsolete or not entry.msgid.strip():
            continue
        if entry.msgid_plural:
            singular = entry.msgid if len(entry.msgstr_plural) > 1 else entry.msgid_plural
            for form, text in sorted(entry.msgstr_plural.items()):
                if not text:
                    found.append(Gap(entry, entry.msgid_plural if form else singular, form))
        elif not entry.msgstr:
            found.append(Gap(entry, entry.msgid))
    return found


def placeholders(text: str) -> Counter[str]:
    """Count the placeholders of a text."""
    found = (match[0] for match in PLACEHOLDERS.finditer(text))
    return Counter(re.sub("`[^`<]+<", "`<", name) if name[0] == ":" else name for name in found)


def in_utf8(catalogue: polib.POFile) -> bytes:
    """Encode the catalogue in UTF-8, and declare UTF-8 in its header."""
    if codecs.lookup(catalogue.encoding).name != "utf-8":
        catalogue.metadata["Content-Type"] = "text/plain; charset=UTF-8"
    return str(catalogue).encode()


def report(path: Path, found: Sequence[Gap]) -> str:
    """Return a report: the number of filled entries, and the first `SHOWN` entries with wrong placeholders."""
    entries: dict[int, list[str]] = {}
    for gap in (gap for gap in found if gap.is_filled):
        entries.setdefault(gap.line, []).extend(gap.wrong)
    faults = [f"  line {line}: {', '.join(dict.fromkeys(wrong))}" for line, wrong in entries.items() if wrong]
    lines = [f"{path}: entries filled and marked as fuzzy: {len(entries)}; with wrong placeholders: {len(faults)}."]
    if len(faults) > SHOWN:
        faults[SHOWN:] = [f"  and {len(faults) - SHOWN} more"]
    return "\n".join(lines + faults)
