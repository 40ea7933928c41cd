"""Candidates that are read from handwritten files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fairseq.data import Dictionary
from torch._subclasses.fake_tensor import FakeTensorMode

from fairseq_plugins.vocabulary.candidates import Candidates

SOURCE = ["the", "house", "cat", "rare"]
TARGET = ["die", "das", "Haus", "Katze", "Kater", "Gebäude", "selten"]
LEXICON = """\
the das 0.5
the die 0.4
the Haus 0.1
house Haus 0.7
house Unbekannt 0.2
house Gebäude 0.1
unknown selten 1
cat <unk> 0.5
cat Katze 0.3
cat Kater 0.2
<unk> selten 1.0
"""
FREQUENT = "</s> 100\nUnbekannt 90\ndie 50\ndas 40\nHaus 30\n"

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(candidates: str = LEXICON, frequent: str = FREQUENT) -> Path:
        (tmp_path / "candidates.txt").write_bytes(candidates.encode(errors="surrogateescape"))
        (tmp_path / "frequent.txt").write_bytes(frequent.encode())
        return tmp_path

    return write


def dictionary(words: list[str]) -> Dictionary:
    made = Dictionary()
    for word in words:
        made.add_symbol(word)
    return made


def read(folder: Path, per_word: int = 2, frequent: int = 1) -> Candidates:
    return Candidates.read(folder, dictionary(SOURCE), dictionary(TARGET), per_word, frequent)


def chosen(candidates: Candidates, src_tokens: torch.Tensor) -> torch.Tensor:
    mask = candidates.mask(src_tokens)
    assert mask.dtype == torch.bool
    return mask.nonzero().squeeze(1)


def candidates(folder: Path, sentences: list[str], **options: int) -> list[str]:
    source, target = dictionary(SOURCE), dictionary(TARGET)
    rows = [[source.index(word) for word in sentence.split()] for sentence in sentences]
    length = max(map(len, rows))
    tokens = torch.tensor([[source.pad()] * (length - len(row)) + row for row in rows])
    found = chosen(read(folder, **options), tokens)
    assert found.dtype == torch.long
    assert found.tolist()[:4] == [0, 1, 2, 3]  # special symbols keep their indices
    assert found.tolist() == sorted(set(found.tolist()))
    return [target[index] for index in found[4:].tolist()]


def test_union_over_the_batch(write: Write) -> None:
    """A padded batch has a repeated word; an unknown translation of `house` does not count towards K."""
    assert candidates(write(), ["the house the </s>", "cat </s>"]) == [
        *("die", "das", "Haus", "Katze", "Kater", "Gebäude"),
    ]
    assert candidates(write(), ["cat </s>"]) == ["die", "Katze", "Kater"]


def test_numbers_of_candidates(write: Write) -> None:
    assert candidates(write(), ["cat the </s>"], per_word=1, frequent=0) == ["das", "Katze"]
    assert candidates(write(), ["the </s>"], per_word=3, frequent=0) == ["die", "das", "Haus"]
    assert candidates(write(), ["the </s>"], per_word=100, frequent=100) == ["die", "das", "Haus"]
    assert candidates(write(), ["cat </s>"], per_word=1, frequent=2) == ["die", "das", "Katze"]


def test_a_table_has_no_more_columns_than_needed(write: Write) -> None:
    """Checkpoints contain the table, so a large value of the option must not make them large."""
    assert read(write(), per_word=10**9).translations.shape == (len(dictionary(SOURCE)), 3)


@pytest.mark.parametrize(
    ("lexicon", "expected"),
    [
        (LEXICON, []),  # unknown words, special symbols (even if listed), and words that are not in the file
        ("rare das 0.5\ncat Katze 1\nrare die 0.4\nrare Haus 0.1\n", ["die", "das"]),  # lines need not be adjacent
        ("rare das 0.5\nrare das 0.5\nrare die 0.4\n", ["die", "das"]),  # a word counts once
    ],
)
def test_lines_of_a_word(write: Write, lexicon: str, expected: list[str]) -> None:
    assert candidates(write(lexicon), ["never seen rare <unk> </s>"], frequent=0) == expected


def test_a_frequent_word_counts_once(write: Write) -> None:
    folder = write(frequent="Haus 3\nHaus 3\nKatze 2\nKater 1\n")
    assert candidates(folder, ["never"], frequent=2) == ["Haus", "Katze"]


def test_odd_words(tmp_path: Path) -> None:
    """Some words contain characters that Python treats as white space or line ends; the last line has no line feed."""
    words = ["a\u2028b", "c\x85d", "e\u00a0f", "g\rh"]
    (tmp_path / "candidates.txt").write_bytes("\n".join(f"{word} {word} 1" for word in words).encode())
    (tmp_path / "frequent.txt").write_bytes(f"{words[0]} 1".encode())
    both = dictionary(words)
    found = chosen(Candidates.read(tmp_path, both, both, 1, 0), torch.tensor([[4, 5], [6, 7]]))
    assert found.tolist() == list(range(8))


@pytest.mark.parametrize("devices", [("cpu", "meta", "meta"), ("meta", "cpu")])
def test_masks_are_on_the_device_of_the_source(write: Write, devices: tuple[str, ...]) -> None:
    """The meta device stands for a GPU."""
    made = read(write())
    with FakeTensorMode(allow_non_fake_inputs=True):  # allows copies from that device
        for device in devices:
            assert made.mask(torch.zeros(2, 3, dtype=torch.long, device=device)).device.type == device


@pytest.mark.parametrize(
    ("files", "place"),
    [
        ({"candidates": "the das 0.5\nthe die\n"}, "candidates.txt, line 2"),
        ({"candidates": "the\tdas\t0.5\n"}, "candidates.txt, line 1"),
        ({"candidates": "the das Haus 0.5\n"}, "candidates.txt, line 1"),
        ({"candidates": "the das nan\n"}, "candidates.txt, line 1"),
        ({"candidates": "the das 0.4\ncat Katze 0.9\nthe die 0.5\n"}, "candidates.txt, line 3"),
        ({"candidates": "the das 1\n\udcff\udcfe 1\n"}, "candidates.txt, line 2"),
        ({"frequent": "die 1\n" * 9 + "das 2\n"}, "frequent.txt, line 10"),
        ({"frequent": "die 1\ndas\n"}, "frequent.txt, line 2"),
        ({"candidates": "das the 0.5\nHaus house 0.5\n"}, "candidates.txt"),
        ({"candidates": ""}, "candidates.txt"),
    ],
)
def test_malformed(write: Write, files: dict[str, str], place: str) -> None:
    folder = write(**files)
    with pytest.raises(ValueError, match=place):
        read(folder, frequent=9)


@pytest.mark.parametrize("name", ["candidates.txt", "frequent.txt"])
def test_missing(write: Write, name: str) -> None:
    folder = write()
    (folder / name).unlink()
    with pytest.raises(ValueError, match=name):
        read(folder)


@pytest.mark.parametrize("options", [{"per_word": 0}, {"per_word": -1}, {"frequent": -1}])
def test_options_out_of_range(write: Write, options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"^--candidates-per-word|^--frequent-candidates"):
        read(write(), **options)
