"""Texts, dictionaries, embeddings and data: lines stay aligned, and errors name the file."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from fairseq import utils
from fairseq.data import Dictionary, TokenBlockDataset, data_utils
from fairseq.tasks.translation import TranslationConfig, TranslationTask

from fairseq_plugins.repairs.data import ends_lines_at_carriage_returns
from tests.commands import USER_DIR, run, save_model
from tests.conftest import random_model

LINES = ["w1\rw2", "w3 \x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029 w4", "", "\rw5\r\r", "w6\r w7\r", "w8"]
WORDS = ["w1 w2", "w3 w4", "", "w5", "w6 w7", "w8"]


def preprocess(folder: Path, data: Path, *options: object, source: bytes, target: bytes, succeeds: bool = True) -> str:
    """Binarise one text as the test part, and return the command's output."""
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
    """fairseq splits a sentence at a carriage return, and misaligns all pairs after it."""
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
        (b"w1\n\xff\n", "text.tgt, line 2: invalid UTF-8"),
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
    """Return a random model for sources of up to 16 tokens."""
    task = TranslationTask.setup_task(TranslationConfig(data=str(data), source_lang="src", target_lang="tgt"))
    options = {"max_source_positions": 16, "max_target_positions": 16, "criterion": "cross_entropy"}
    args, model = random_model("convs2s_tiny", task, **options, task="translation")
    return save_model(model, args, tmp_path_factory.mktemp("texts") / "model.pt")


def generate(folder: Path, data: Path, checkpoint: Path, *options: object) -> str:
    """Return the error of ``fairseq-generate`` with the data of a folder."""
    for dictionary in data.glob("dict.*.txt"):
        shutil.copy(dictionary, folder)
    words = [folder, "--user-dir", USER_DIR, "--path", checkpoint, "--task", "translation", *options]
    return run("generate", *words, succeeds=False).stderr


@pytest.mark.parametrize("implementation", ["mmap", "raw"])
def test_data_without_sentences_is_named(tmp_path: Path, data: Path, checkpoint: Path, implementation: str) -> None:
    """`fairseq-preprocess` without the plugin makes it from an empty text."""
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
def test_an_empty_translation_is_reported(tmp_path: Path, data: Path, checkpoint: Path, few: bool) -> None:
    """All sentences are too long, or they are in the other shards."""
    for side in ("src", "tgt"):
        (tmp_path / f"test.src-tgt.{side}").write_text("w1\n" if few else "w1 " * 20 + "\n")
    shard = ["--distributed-world-size", 3, "--distributed-rank", 2 if few else 0]
    options = ["--dataset-impl", "raw", "--skip-invalid-size-inputs-valid-test", *shard]
    assert "ValueError: --gen-subset" in generate(tmp_path, data, checkpoint, *options)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (POINTER, "line 1: the file is a pointer"),
        (b"/annex/objects/SHA256E-s9--0.txt\n", "line 1: the file is a pointer"),
        (b"w1 5\nw2 4\nw1 3\n", "line 3: duplicate word 'w1'"),
        (b"<unk> 5\n", "'<unk>'"),
        (b"w1 5\nw2\t4\n", "line 2: expected `word count`"),
        (b"w1 5\nw2\n", "line 2: expected `word count`"),
        (b"w1 5\n\nw2 4\n", "line 2: expected `word count`"),
        (b"w1 5\nw2 0.5\n", "line 2: expected `word count`"),
        (b"w1 5\n#fairseq:overwrite\n", "line 2: expected `word count`"),
        (b"w1 5\nw1 4 #fairseq:overwrite\nw2\n", "line 3: expected `word count`"),
        (b"w1 5\nw\xe4 4\n", "line 2 is not UTF-8"),
        ("w1 5\n".encode("utf-16"), "line 1 is not UTF-8"),
        (b"\x80\x02cposix\nsystem\n", "line 1 is not UTF-8"),
        (b"\xef\xbb\xbfw1 5\n", "line 1 begins with a byte order mark"),
        (b"", "the dictionary has no words"),
    ],
)
def test_file_and_line_of_a_dictionary_are_named(content: bytes, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "dict.en.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^{re.escape(f'{path}: ')}.*{re.escape(fault)}"):
        Dictionary.load(str(path))


def test_valid_dictionaries_are_read_as_before(tmp_path: Path) -> None:
    path = tmp_path / "dict.en.txt"
    path.write_bytes("w1 5\r\n\u2581 w 4\nw1 3 #fairseq:overwrite\n".encode())
    read = Dictionary.load(str(path))
    assert read.symbols[read.nspecial :] == ["w1", "\u2581 w", "w1"]
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Dictionary.load(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("task", ["translation", "translation_fast"])
def test_commands_name_the_dictionary(data: Path, task: str, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "bin")
    path = tmp_path / "bin" / "dict.tgt.txt"
    path.write_bytes(POINTER)
    words = ["--user-dir", USER_DIR, "--arch", "convs2s_tiny", "--optimizer", "sgd", "--batch-size", 1, "--task", task]
    assert f"ValueError: {path}: line 1: " in run("train", path.parent, *words, succeeds=False).stderr


@pytest.mark.parametrize("header", ["", "3 2\n"])
def test_embeddings_are_read_with_and_without_a_header(tmp_path: Path, header: str) -> None:
    (tmp_path / "words").write_text(header + "a 1 2\n7 3 4\n8 5 6\n")
    vectors = utils.parse_embedding(str(tmp_path / "words"))
    assert {word: vector.tolist() for word, vector in vectors.items()} == {"a": [1, 2], "7": [3, 4], "8": [5, 6]}


def test_data_sets_of_language_models_work_with_numpy_2() -> None:
    tokens = [torch.tensor([4, 5, 2]), torch.tensor([6, 2])]
    blocks = TokenBlockDataset(tokens, [3, 2], block_size=None, pad=1, eos=2, break_mode="eos")
    assert [block.tolist() for block in blocks] == [[4, 5, 2], [6, 2]]
