"""Dictionaries that cannot be read: the error names file, line and fix."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from fairseq.data import Dictionary

from tests.commands import USER_DIR, run

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (POINTER, "line 1: it is a pointer"),
        (b"/annex/objects/SHA256E-s9--0.txt\n", "line 1: it is a pointer"),
        (b"w1 5\nw2 4\nw1 3\n", "line 3: the word 'w1' is in line 1"),
        (b"<unk> 5\n", "'<unk>'"),
        (b"w1 5\nw2\t4\n", "line 2: expected `word count`"),
        (b"w1 5\nw2\n", "line 2: expected `word count`"),
        (b"w1 5\n\nw2 4\n", "line 2: expected `word count`"),
        (b"w1 5\nw2 0.5\n", "line 2: expected `word count`"),
        (b"w1 5\n#fairseq:overwrite\n", "line 2: expected `word count`"),
        (b"w1 5\nw\xe4 4\n", "line 2 is not UTF-8"),
        ("w1 5\n".encode("utf-16"), "line 1 is not UTF-8"),
        (b"\x80\x02cposix\nsystem\n", "line 1 is not UTF-8"),
        (b"\xef\xbb\xbfw1 5\n", "line 1 begins with a byte order mark"),
        (b"", "it has no words"),
    ],
)
def test_file_and_line_are_named(content: bytes, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "dict.en.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^{re.escape(f'{path}: ')}.*{re.escape(fault)}"):
        Dictionary.load(str(path))


def test_what_fairseq_reads_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "dict.en.txt"
    path.write_bytes("w1 5\r\n\u2581 w 4\nw1 3 #fairseq:overwrite\n".encode())
    read = Dictionary.load(str(path))
    assert read.symbols[read.nspecial :] == ["w1", "\u2581 w", "w1"]
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Dictionary.load(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("task", ["translation", "translation_fast"])
def test_commands_name_it(data: Path, task: str, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "bin")
    path = tmp_path / "bin" / "dict.tgt.txt"
    path.write_bytes(POINTER)
    words = ["--user-dir", USER_DIR, "--arch", "convs2s_tiny", "--optimizer", "sgd", "--batch-size", 1, "--task", task]
    assert f"ValueError: {path}: line 1: " in run("train", path.parent, *words, succeeds=False).stderr
