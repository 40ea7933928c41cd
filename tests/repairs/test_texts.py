"""Parallel texts stay parallel, and texts and data of no use are refused with their names."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from fairseq.data import Dictionary, data_utils
from fairseq.tasks.translation import TranslationConfig, TranslationTask

from fairseq_plugins.repairs.texts import ends_lines_at_carriage_returns
from tests.commands import USER_DIR, run, save_model
from tests.conftest import random_model

LINES = ["w1\rw2", "w3 \x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029 w4", "", "\rw5\r\r", "w6\r w7\r", "w8"]
WORDS = ["w1 w2", "w3 w4", "", "w5", "w6 w7", "w8"]


def preprocess(folder: Path, data: Path, *options: object, source: bytes, target: bytes, succeeds: bool = True) -> str:
    """Binarise one text as the test part, and return what the command printed."""
    (folder / "text.src").write_bytes(source)
    (folder / "text.tgt").write_bytes(target)
    dictionaries = ["--joined-dictionary", "--srcdict", data / "dict.src.txt"]
    words = ["-s", "src", "-t", "tgt", *dictionaries, "--testpref", folder / "text", "--destdir", folder / "bin"]
    result = run("preprocess", "--user-dir", USER_DIR, *words, *options, succeeds=succeeds)
    return result.stdout + result.stderr


@pytest.mark.parametrize(
    "options", [[], ["--workers", 4], ["--dataset-impl", "raw"], ["--dataset-impl", "lazy"]], ids=str
)
def test_only_a_line_feed_ends_a_line(data: Path, tmp_path: Path, options: list[object]) -> None:
    """Without the repair, a carriage return makes two sentences of one, and moves all that follow."""
    text = "\n".join(LINES).encode()
    preprocess(tmp_path, data, *options, source=text, target="\n".join(WORDS).encode())
    words = Dictionary.load(str(data / "dict.src.txt"))
    implementation = options[1] if "--dataset-impl" in options else "mmap"
    for side in ("src", "tgt"):
        found = data_utils.load_indexed_dataset(str(tmp_path / f"bin/test.src-tgt.{side}"), words, implementation)
        assert [words.string(found[place]) for place in range(len(found))] == WORDS
    assert not ends_lines_at_carriage_returns()


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (b"w1\nw2\nw3\n", "text.src has 2 lines, .*text.tgt has 3"),
        (b"w1\n", "text.src has 2 lines, .*text.tgt has 1"),
        (b"", "text.tgt is empty"),
        (b"w1\n\xff\n", "text.tgt, line 2 is not UTF-8"),
        (b"w1\rw2\r", "text.tgt .*carriage returns"),
    ],
    ids=["longer", "shorter", "empty", "latin", "mac"],
)
def test_texts_that_do_not_match_are_refused_before_anything_is_written(
    data: Path, tmp_path: Path, target: bytes, reason: str
) -> None:
    printed = preprocess(tmp_path, data, source=b"w1\nw2", target=target, succeeds=False)
    assert re.search(f"ValueError: .*{reason}", printed)
    assert not (tmp_path / "bin").exists()


@pytest.fixture(scope="module")
def checkpoint(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model for sources of up to 16 tokens."""
    task = TranslationTask.setup_task(TranslationConfig(data=str(data), source_lang="src", target_lang="tgt"))
    options = {"max_source_positions": 16, "max_target_positions": 16, "criterion": "cross_entropy"}
    args, model = random_model("convs2s_tiny", task, **options, task="translation")
    return save_model(model, args, tmp_path_factory.mktemp("texts") / "model.pt")


def generate(folder: Path, data: Path, checkpoint: Path, *options: object) -> str:
    """The error of ``fairseq-generate`` with the data of a folder."""
    for dictionary in data.glob("dict.*.txt"):
        shutil.copy(dictionary, folder)
    words = [folder, "--user-dir", USER_DIR, "--path", checkpoint, "--task", "translation", *options]
    return run("generate", *words, succeeds=False).stderr


@pytest.mark.parametrize("implementation", ["mmap", "raw"])
def test_data_without_sentences_is_named(tmp_path: Path, data: Path, checkpoint: Path, implementation: str) -> None:
    """As `fairseq-preprocess` makes it of an empty text without the plugin."""
    for side in ("src", "tgt"):
        for end in ("", ".idx", ".bin"):
            (tmp_path / f"test.src-tgt.{side}{end}").touch()
    printed = generate(tmp_path, data, checkpoint, "--dataset-impl", implementation)
    assert re.search(r"ValueError: .*test\.src-tgt\.src.* has no sentences", printed)


def test_sides_of_different_lengths_are_named(tmp_path: Path, data: Path, checkpoint: Path) -> None:
    (tmp_path / "test.src-tgt.src").write_text("w1\nw2\n")
    (tmp_path / "test.src-tgt.tgt").write_text("w1\n")
    printed = generate(tmp_path, data, checkpoint, "--dataset-impl", "raw")
    assert re.search(f"ValueError: {tmp_path}/test: .*same number", printed)


@pytest.mark.parametrize("few", [False, True])
def test_it_is_said_that_nothing_is_left_to_translate(tmp_path: Path, data: Path, checkpoint: Path, few: bool) -> None:
    """All sentences are too long, or all of them are in the other shards."""
    for side in ("src", "tgt"):
        (tmp_path / f"test.src-tgt.{side}").write_text("w1\n" if few else "w1 " * 20 + "\n")
    shard = ["--distributed-world-size", 3, "--distributed-rank", 2 if few else 0]
    options = ["--dataset-impl", "raw", "--skip-invalid-size-inputs-valid-test", *shard]
    assert "ValueError: --gen-subset" in generate(tmp_path, data, checkpoint, *options)
