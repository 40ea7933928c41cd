"""Parallel text, lexicons and dictionaries: any bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from fairseq.data import Dictionary
from fairseq.tokenizer import tokenize_line
from hypothesis import given
from hypothesis import strategies as st

from fairseq_plugins.generation.candidates import Candidates
from fairseq_plugins.tools import lexicon
from fairseq_plugins.unknown_words import read_translations
from tests.fuzz.trial import Trial, fuzz

KNOWN = ["a", "b", "ä", "0.5"]
NUMBERS = ["0", "1", "0.5", "-1", "nan", "1e999"]
WORDS = [*KNOWN, *NUMBERS, "<unk>", "</s>", "#fairseq:overwrite", "x" * 300, "漢"]
SPACES = [" ", " ", " ", "\n", "\n", "\n", "\t", "\r", "\r\n", "\0", "\x1c", "\x85", "\u2028", "\xa0", "\ufeff", ""]
words = st.sampled_from(WORDS)
pieces = st.sampled_from(WORDS + SPACES).map(str.encode) | st.sampled_from([b"\xff", b"\xc3", b"\xed\xa0\x80"])
lines = st.lists(st.lists(words, min_size=1, max_size=4).map(" ".join), max_size=6).map("\n".join).map(str.encode)
files = st.lists(pieces, max_size=30).map(b"".join) | lines | st.binary(max_size=60)
entries = st.builds("{} {} {}".format, words, words, st.sampled_from(NUMBERS))
candidate_files = st.lists(entries, max_size=9).map("\n".join).map(str.encode) | files


def fairseq_words(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8") as text:
        return [tokenize_line(line) for line in text]


def test_parallel_text(file: Path) -> None:
    """What is read is what fairseq takes for lines and words."""
    other = file.with_suffix(".other")
    trial = Trial(lambda: list(lexicon.read_pairs(file, other)), ValueError)

    @fuzz
    @given(files, files)
    def run(source: bytes, target: bytes) -> None:
        file.write_bytes(source)
        other.write_bytes(target)
        pairs = trial()
        if pairs is not None:
            assert pairs == [pair for pair in zip(fairseq_words(file), fairseq_words(other), strict=True) if pair[0]]

    run()


ends = st.sampled_from(["0", "1", "2", "9", "-1", "", "x", "²", "9" * 30])
links = st.builds("{}-{}".format, ends, ends) | words
alignments = st.lists(st.lists(links, max_size=3).map(" ".join), max_size=4).map("\n".join).map(str.encode) | files


def test_links(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an aligner may have written for two pairs of three words and one."""
    monkeypatch.setattr(lexicon, "tqdm", lambda pairs, **_: pairs)
    folder = file.with_name("work")
    folder.mkdir()
    for name in ("source", "target"):
        (folder / name).write_text("a b c\nd\n")
    trial = Trial(lexicon.count_links, ValueError)

    @fuzz
    @given(alignments, alignments)
    def run(forward: bytes, reverse: bytes) -> None:
        (folder / "forward").write_bytes(forward)
        (folder / "reverse").write_bytes(reverse)
        found = trial(folder, 2)
        if found is not None:
            assert sum(counts.total() for counts in found.values()) == len(forward.split() + reverse.split())
            assert set("abcd") >= {*found} | {word for counts in found.values() for word in counts}

    run()


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
    @given(candidate_files, files)
    def run(candidates: bytes, frequent: bytes) -> None:
        (folder / "candidates.txt").write_bytes(candidates)
        (folder / "frequent.txt").write_bytes(frequent)
        found = trial()
        if found is not None:
            assert found.always.shape == (len(dictionary),)
            assert found.translations.shape == (len(dictionary), 2)
            assert set(found.translations.flatten().tolist()) <= {dictionary.pad(), *ordinary}

    run()


def test_dictionaries_of_unknown_words(file: Path) -> None:
    trial = Trial(read_translations, ValueError)

    @fuzz
    @given(files)
    def run(text: bytes) -> None:
        file.write_bytes(text)
        found = trial(str(file))
        if found is not None:
            assert all(len(word.split()) == 1 for pair in found.items() for word in pair)

    run()


def load_dictionary(path: str) -> Dictionary | None:
    """fairseq's own reader, which raises a bare Exception where text is not UTF-8."""
    try:
        return Dictionary.load(path)
    except Exception as error:
        if type(error) in (ValueError, RuntimeError) or "Incorrect encoding" in str(error):
            return None
        raise


def test_dictionaries_of_fairseq(file: Path) -> None:
    trial = Trial(load_dictionary)

    @fuzz
    @given(files)
    def run(text: bytes) -> None:
        file.write_bytes(text)
        found = trial(str(file))
        if found is not None:
            assert len(found.symbols) == len(found.count) >= len(found.indices)

    run()
