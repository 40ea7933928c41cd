"""Parallel text, lexicons and dictionaries of arbitrary bytes are read or rejected."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from fairseq.data import Dictionary
from fairseq.tokenizer import tokenize_line

from fairseq_plugins.cli import lexicon
from fairseq_plugins.vocabulary.candidates import Candidates
from fairseq_plugins.vocabulary.unknown_words import read_translations
from tests.fuzz.texts import several
from tests.fuzz.trial import Trial, fuzz

KNOWN = ["a", "b", "ä", "0.5"]
NUMBERS = ["0", "1", "0.5", "-1", "nan", "1e999"]
WORDS = [*KNOWN, *NUMBERS, "<unk>", "</s>", "#fairseq:overwrite", "x" * 300, "漢"]
SPACES = [" ", " ", " ", "\n", "\n", "\n", "\t", "\r", "\r\n", "\0", "\x1c", "\x85", "\u2028", "\xa0", "\ufeff", ""]
PIECES = [*map(str.encode, WORDS + SPACES), b"\xff", b"\xc3", b"\xed\xa0\x80"]


def word(random: Random) -> str:
    return random.choice(WORDS)


def words(random: Random) -> str:
    return " ".join(several(random, word, 1, 4))


def pieces(random: Random) -> bytes:
    return b"".join(random.choices(PIECES, k=random.randint(0, 30)))


def lines(random: Random) -> bytes:
    return "\n".join(several(random, words, 0, 6)).encode()


def noise(random: Random) -> bytes:
    return random.randbytes(random.randint(0, 60))


def content(random: Random) -> bytes:
    return random.choice([pieces, lines, noise])(random)


def entry(random: Random) -> str:
    return f"{word(random)} {word(random)} {random.choice(NUMBERS)}"


def entries(random: Random) -> bytes:
    return "\n".join(several(random, entry, 0, 9)).encode()


def fairseq_words(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8") as text:
        return [tokenize_line(line) for line in text]


def test_parallel_text(file: Path) -> None:
    """The lexicon's reader finds the same lines and words as fairseq."""
    other = file.with_suffix(".other")
    trial = Trial(lambda: list(lexicon.read_word_pairs(file, other)), ValueError)

    @fuzz
    def run(random: Random) -> None:
        source = content(random)
        file.write_bytes(source)
        other.write_bytes(random.choice([content(random), source]))
        pairs = trial()
        if pairs is not None:
            assert pairs == [pair for pair in zip(fairseq_words(file), fairseq_words(other), strict=True) if pair[0]]


ENDS = [*"0" * 30, *"12" * 4, "9", "-1", "", "x", "²", "9" * 30]


def link(random: Random) -> str:
    return "-".join(random.choices(ENDS, k=2)) if random.random() < 0.95 else word(random)


def links(random: Random) -> str:
    return " ".join(several(random, link, 0, 3))


def alignments(random: Random) -> bytes:
    return "\n".join(several(random, links, *random.choice([(2, 2), (0, 4)]))).encode()


def test_links(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The aligned text has two pairs, one of three words and one of a single word."""
    monkeypatch.setattr(lexicon, "bar", lambda pairs, **_: pairs)
    folder = file.with_name("work")
    folder.mkdir()
    for name in ("source", "target"):
        (folder / name).write_text("a b c\nd\n")
    trial = Trial(lexicon.count_links, ValueError)

    @fuzz
    def run(random: Random) -> None:
        forward, reverse = (random.choice([alignments, alignments, content])(random) for _ in range(2))
        (folder / "forward").write_bytes(forward)
        (folder / "reverse").write_bytes(reverse)
        found = trial(folder, 2)
        if found is not None:
            assert sum(counts.total() for counts in found.values()) == len((forward + b" " + reverse).decode().split())
            assert set("abcd") >= {*found} | {word for counts in found.values() for word in counts}


@pytest.fixture
def dictionary() -> Dictionary:
    dictionary = Dictionary()
    for word in KNOWN:
        dictionary.add_symbol(word)
    return dictionary


def test_candidates(file: Path, dictionary: Dictionary) -> None:
    folder = file.with_name("lexicon")
    folder.mkdir()
    trial = Trial(lambda: Candidates.read(folder, dictionary, dictionary, 2, 3), ValueError)
    ordinary = range(dictionary.nspecial, len(dictionary))

    @fuzz
    def run(random: Random) -> None:
        (folder / "candidates.txt").write_bytes(random.choice([entries, content])(random))
        (folder / "frequent.txt").write_bytes(content(random))
        found = trial()
        if found is not None:
            assert found.always.shape == (len(dictionary),)
            assert len(found.translations) == len(dictionary)
            assert 1 <= found.translations.size(1) <= 2
            assert set(found.translations.flatten().tolist()) <= {dictionary.pad(), *ordinary}


def test_dictionaries_of_unknown_words(file: Path) -> None:
    trial = Trial(read_translations, ValueError)

    @fuzz
    def run(random: Random) -> None:
        file.write_bytes(content(random))
        found = trial(str(file))
        if found is not None:
            assert all(len(word.split()) == 1 for pair in found.items() for word in pair)
