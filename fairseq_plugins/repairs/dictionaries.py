"""Errors in dictionaries (``dict.xx.txt``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fairseq.data import Dictionary
from fairseq.file_io import PathManager

from fairseq_plugins.repairs.wrapping import in_place_of, raises

POINTERS = (b"version https://git-lfs", b"/annex/objects/")  # in git, files that stand for large ones begin so
OVERWRITE = "#fairseq:overwrite"


def name_bad_lines_of_dictionaries() -> None:
    """fairseq names neither file nor line of a dictionary that it cannot read, and accepts one without words.

    There is nothing to probe: other dictionaries are left alone.
    """
    add = Dictionary.add_from_file

    @in_place_of(Dictionary, "add_from_file")
    def add_from_file(self: Any, f: Any) -> None:
        if not isinstance(f, str):  # an open file, which fairseq's own method passes on
            add(self, f)
            return
        before = len(self)
        try:
            add(self, f)
            fault = None
            if len(self) == before:
                fault = "it has no words"
            elif self[before].startswith("\ufeff"):
                fault = "line 1 begins with a byte order mark, which would be part of the word"
        except OSError:
            raise
        except Exception as error:  # fairseq raises three kinds
            fault = first_fault(f) or str(error)
        if fault is not None:
            raise ValueError(f"{f}: {fault}; restore the dictionary of the training, or make it by fairseq-preprocess")


def first_fault(name: str) -> str | None:
    """Find the first line that fairseq does not read."""
    seen: dict[str, int] = {}
    lines = Path(PathManager.get_local_path(name)).read_bytes().splitlines()
    if lines and lines[0].startswith(POINTERS):
        return "line 1: it is a pointer to a large file, and not the dictionary; run git lfs pull or git annex get"
    for number, line in enumerate(lines, start=1):
        try:
            text = line.decode().rstrip()
        except UnicodeDecodeError as error:
            return f"line {number} is not UTF-8: {error}"
        word, space, count = text.removesuffix(f" {OVERWRITE}").rpartition(" ")
        if not space or raises(ValueError, int, count):
            return f"line {number}: expected `word count` with one space, found {text[:100]!r}"
        if word in seen and not text.endswith(OVERWRITE):
            return f"line {number}: the word {word!r} is in line {seen[word]} already"
        seen[word] = number
    return None
