"""Replacement of unknown words, with handwritten attention and files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq import utils
from fairseq.data import Dictionary

from fairseq_plugins.vocabulary.unknown_words import (
    SourceWords,
    keep_source_words,
    read_translations,
    replace_unknown_words,
)

EOS, PAD, UNK = 2, 1, 3
ATTENTION = torch.tensor([[0.5, 0.4, 0.0], [0.1, 0.0, 0.1], [0.4, 0.9, 0.9], [0.2, 0.2, 0.3], [0.2, 0.4, 0.6]])


@pytest.mark.parametrize("padding", ["left", "right"])
def test_only_words_are_attended_to(padding: str) -> None:
    """Three target words attend most to padding, equally to a word and an end, and to an end, which is also a word."""
    order = [0, 1, 2, 3, 4] if padding == "left" else [1, 2, 3, 4, 0]
    source = torch.tensor([[PAD, 7, EOS, UNK, EOS]])
    task = SimpleNamespace(source_dictionary=Dictionary(), get_interactive_tokens_and_lengths=None)
    found = [[{"alignment": [(0, 0)], "attention": ATTENTION[order]}]]
    generator = SimpleNamespace(generate=lambda models, sample: found)
    keep_source_words(task, generator)
    generator.generate([], {"net_input": {"src_tokens": source[:, order]}})
    (aligned,) = (hypo["alignment"] for hypo in found[0])
    assert aligned == [(0, 0)]
    assert (aligned.length, aligned.positions) == (2, [1, 1, 1])


@pytest.mark.parametrize(("offset", "positions"), [(-1, [0, 0, 2]), (0, [0, 1, 3]), (2, [2, 3, 3])])
def test_an_offset_is_clipped_to_the_sentence(offset: int, positions: list[int]) -> None:
    attention = torch.zeros(5, 3)
    attention[[0, 1, 3], [0, 1, 2]] = 1
    aligned = SourceWords([], attention, torch.tensor([True, True, True, True, False]), offset)
    assert aligned.positions == positions


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="--replace-unk"):
        SourceWords([], torch.empty(0), torch.tensor([True, False]))


@pytest.fixture
def target() -> Dictionary:
    target = Dictionary()
    for word in ("der", "Hund"):
        target.add_symbol(word)
    return target


def align(positions: list[int], length: int) -> SourceWords:
    attention = torch.zeros(length + 1, len(positions))
    attention[positions, range(len(positions))] = 1
    return SourceWords([], attention, torch.arange(length + 1) < length)


def test_words_of_a_buffer_are_dropped_with_it(target: Dictionary) -> None:
    """Words that return in a later buffer get new indices, because other words may have taken the old ones."""

    def tokens_of(lines: list[str], encode) -> list[torch.Tensor]:
        return [target.encode_line(encode(line), add_if_not_exist=False) for line in lines]

    task = SimpleNamespace(source_dictionary=target, get_interactive_tokens_and_lengths=tokens_of)
    size = len(target)
    keep_source_words(task, SimpleNamespace(generate=None))
    for lines in (["der Bello", "Rex Hund"], ["Rex", "der Waldi Bello"], ["Hund"]):
        found = task.get_interactive_tokens_and_lengths(lines, str)
        assert [target.string(tokens) for tokens in found] == lines
        assert len(target) == len(target.indices) == len(target.count)
    assert len(target) == size


def test_words_and_tokens_are_not_confused(target: Dictionary) -> None:
    """A start symbol inside a hypothesis is a token but not a word of the hypothesis's text."""
    tokens = torch.tensor([UNK, target.bos(), target.index("Hund"), UNK, UNK, EOS])
    aligned = align([2, 0, 0, 1, 0, 0], length=3)
    size = len(target)
    found = utils.post_process_prediction(tokens, "the  cat Rex", aligned, {"cat": "Katze"}, target)
    assert found[1] == "Rex Hund Katze the"
    assert found[0].tolist() == [UNK, target.index("Hund"), UNK, UNK, EOS]
    assert found[2] is aligned
    assert len(target) == size


def test_raw_text_that_the_model_does_not_read_is_refused(target: Dictionary) -> None:
    tokens = torch.tensor([UNK, EOS])
    for alignment in (align([0, 1], length=2), [(0, 0)]):
        with pytest.raises(ValueError, match="--replace-unk"):
            replace_unknown_words(tokens, "<unk>", alignment, "a b c", {}, target)


def test_dictionary_lines(tmp_path: Path) -> None:
    path = tmp_path / "dictionary"
    path.write_text("Hund dog\nÄpfel\tapples \n", encoding="utf-8")
    assert read_translations(str(path)) == {"Hund": "dog", "Äpfel": "apples"}
    assert read_translations(None) is None


@pytest.mark.parametrize(
    "line", [b"", b"Hund", b"New York Neu-York", b"\xff cat", b"Hund dog\rKatze cat", b"w " * 10**6]
)
def test_a_malformed_dictionary_is_refused(line: bytes, tmp_path: Path) -> None:
    (tmp_path / "dictionary").write_bytes(b"Hund dog\n" + line + b"\nKatze cat\n")
    with pytest.raises(ValueError, match=r"dictionary, line 2\b") as error:
        utils.load_align_dict(str(tmp_path / "dictionary"))
    assert len(str(error.value)) < 400
