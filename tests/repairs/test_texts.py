"""Texts and dictionaries: lines stay aligned, and errors name the file."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from fairseq.data import Dictionary, data_utils
from fairseq.tasks.translation import TranslationConfig, TranslationTask

from tests.commands import USER_DIR, run, save_model
from tests.conftest import random_model

LINES = ["w1\rw2", "w3 \x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029 w4", "", "\rw5\r\r", "w6\r w7\r", "w8"]
WORDS = ["w1 w2", "w3 w4", "", "w5", "w6 w7", "w8"]


def preprocess(folder: Path, data: Path, *options: object, source: bytes, target: bytes, succeeds: bool = True) -> str:
    """Binarise one text as the test part, and return the command's errors."""
    (folder / "text.src").write_bytes(source)
    (folder / "text.tgt").write_bytes(target)
    dictionaries = ["--joined-dictionary", "--srcdict", data / "dict.src.txt"]
    words = ["-s", "src", "-t", "tgt", *dictionaries, "--testpref", folder / "text", "--destdir", folder / "bin"]
    return run("preprocess", "--user-dir", USER_DIR, *words, *options, succeeds=succeeds).stderr


@pytest.mark.parametrize(
    "options", [[], ["--workers", 4], ["--dataset-impl", "raw"], ["--dataset-impl", "lazy"]], ids=str
)
def test_only_a_line_feed_ends_a_line(data: Path, tmp_path: Path, options: list[object]) -> None:
    """fairseq splits a sentence at a carriage return, and so misaligns all pairs after it."""
    preprocess(tmp_path, data, *options, source="\n".join(LINES).encode(), target="\n".join(WORDS).encode())
    dictionary = Dictionary.load(str(data / "dict.src.txt"))
    implementation = options[1] if "--dataset-impl" in options else "mmap"
    for side in ("src", "tgt"):
        found = data_utils.load_indexed_dataset(str(tmp_path / f"bin/test.src-tgt.{side}"), dictionary, implementation)
        assert [dictionary.string(found[place]) for place in range(len(found))] == WORDS


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (b"w1\nw2\nw3\n", "text.src has 2 lines, .*text.tgt has 3"),
        (b"", "text.tgt is empty"),
        (b"w1\n\xff\n", "text.tgt, line 2"),
        (b"w1\rw2\r", "text.tgt .*carriage returns"),
    ],
    ids=["longer", "empty", "latin", "mac"],
)
def test_misaligned_texts_are_refused_before_anything_is_written(
    data: Path, tmp_path: Path, target: bytes, reason: str
) -> None:
    printed = preprocess(tmp_path, data, source=b"w1\nw2", target=target, succeeds=False)
    assert re.search(reason, printed)
    assert not (tmp_path / "bin").exists()


@pytest.mark.parametrize("few", [False, True])
def test_no_translation_is_an_error(tmp_path: Path, data: Path, few: bool) -> None:
    """All sentences are too long, or all belong to other shards."""
    task = TranslationTask.setup_task(TranslationConfig(data=str(data), source_lang="src", target_lang="tgt"))
    args, model = random_model("convs2s_tiny", task, criterion="cross_entropy", task="translation")
    for side in ("src", "tgt"):
        shutil.copy(data / f"dict.{side}.txt", tmp_path)
        (tmp_path / f"test.src-tgt.{side}").write_text("w1\n" if few else "w1 " * 20 + "\n")
    words = [tmp_path, "--user-dir", USER_DIR, "--path", save_model(model, args, tmp_path / "model.pt")]
    words += ["--task", "translation", "--dataset-impl", "raw", "--max-source-positions", 16]
    words += ["--skip-invalid-size-inputs-valid-test", "--distributed-world-size", 3, "--distributed-rank", 2 * few]
    assert "error: --gen-subset" in run("generate", *words, succeeds=False).stderr


@pytest.mark.parametrize(
    "content",
    [
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        b"w1 5\nw2 4\nw1 3\n",
        b"w1 5\nw2\t4\n",
        b"w1 5\n\nw2 4\n",
        b"w1 5\nw\xe4 4\n",
        b"\x80\x02cposix\nsystem\n",
        b"\xef\xbb\xbfw1 5\n",
        b"",
    ],
)
def test_a_bad_dictionary_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "dict.en.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path}: ')}"):
        Dictionary.load(str(path))


def test_valid_dictionaries_are_read_as_before(tmp_path: Path) -> None:
    path = tmp_path / "dict.en.txt"
    path.write_bytes("w1 5\r\n\u2581 w 4\nw1 3 #fairseq:overwrite\n".encode())
    read = Dictionary.load(str(path))
    assert read.symbols[read.nspecial :] == ["w1", "\u2581 w", "w1"]
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Dictionary.load(str(tmp_path / "nowhere"))
