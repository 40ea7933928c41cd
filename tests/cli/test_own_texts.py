"""Which texts ``own-data`` takes: files and folders by their names, and what is chosen by their size."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from fairseq_plugins.cli.own_data import command as own_data
from tests.cli.conftest import parse


def describe(*words: object) -> Any:
    return own_data.describe(parse(*words, "out"))


def test_folders_are_paired_by_name(texts: Path, tmp_path: Path) -> None:
    for language in ("en", "de"):
        (tmp_path / language).mkdir()
        for name in ("b", "a"):
            (tmp_path / language / f"{name}.txt").write_text((texts / f"train.{language}").read_text())
    corpus = describe(tmp_path / "en", tmp_path / "de")
    assert corpus.languages == ("en", "de")
    assert [[file.place().relative_to(tmp_path).as_posix() for file in pair] for pair in corpus.train] == [
        ["en/a.txt", "de/a.txt"],
        ["en/b.txt", "de/b.txt"],
    ]
    (tmp_path / "de" / "b.txt").unlink()
    with pytest.raises(ValueError, match=r"en/b\.txt is in one language only"):
        describe(tmp_path / "en", tmp_path / "de")


def test_names_with_dots(texts: Path, tmp_path: Path) -> None:
    """As of news.2013.en beside news.2014.en; what the system leaves in folders is no text."""
    names = ["news.2013.{}", "news.2014.{}.gz", "old.de.{}", "talks.{}.txt"]
    for language in ("en", "de"):
        (tmp_path / language / "old").mkdir(parents=True)
        (tmp_path / language / ".DS_Store").write_bytes(b"\xff")
        content = (texts / f"train.{language}").read_bytes()
        for name in names:
            path = tmp_path / language / name.format(language)
            path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    corpus = describe(tmp_path / "en", tmp_path / "de")
    pairs = [tuple(Path(file.path).name for file in pair) for pair in corpus.train]
    assert pairs == [tuple(name.format(language) for language in ("en", "de")) for name in names]
    (tmp_path / "en" / "news.2013.en.gz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"news.2013.en and .*news.2013.en.gz have one name"):
        describe(tmp_path / "en", tmp_path / "de")


def test_names_that_end_in_other_letters(texts: Path, tmp_path: Path) -> None:
    for language, end in (("en", "eng"), ("de", "ger"), ("pt", "pt-BR")):
        text = texts / f"train.{'en' if language == 'en' else 'de'}"
        (tmp_path / language).mkdir()
        (tmp_path / language / f"news.2013.{end}").write_text(text.read_text())
    assert len(describe(tmp_path / "en", tmp_path / "de").train) == 1
    assert len(describe(tmp_path / "en", tmp_path / "pt", "--target-lang", "pt-BR").train) == 1
    for name in ("src_text", "train.de-en", "my_data", "tok_en"):
        with pytest.raises(ValueError, match="does not end in a language"):
            describe(tmp_path / name, tmp_path / "de")
    file = tmp_path / "pt" / "news.2013.pt-BR"
    assert describe(tmp_path / "en" / "news.2013.eng", file).languages == ("eng", "pt-BR")


def test_another_text_under_the_same_name(texts: Path, tmp_path: Path) -> None:
    for language in ("en", "de"):
        (tmp_path / f"a.{language}").write_text((texts / f"train.{language}").read_text())
    before = describe(tmp_path / "a.en", tmp_path / "a.de")
    assert describe(tmp_path / "a.en", tmp_path / "a.de") == before
    moved = tmp_path / "moved"
    moved.mkdir()
    for language in ("en", "de"):
        (moved / f"a.{language}").write_text((texts / f"train.{language}").read_text())
    assert str(describe(moved / "a.en", moved / "a.de")) == str(before), "a project may move"
    (tmp_path / "a.de").write_text((texts / "train.de").read_text().replace("Hund", "Bund"))
    assert describe(tmp_path / "a.en", tmp_path / "a.de") != before


@pytest.mark.parametrize(("pairs", "every", "merges"), [(300, 10, 2000), (29_000, 100, 6000), (160_000, 100, 10_000)])
def test_what_is_chosen_by_the_size(tmp_path: Path, pairs: int, every: int, merges: int) -> None:
    for language in ("en", "de"):
        (tmp_path / f"a.{language}").write_text("x\n" * pairs)
    corpus = describe(tmp_path / "a.en", tmp_path / "a.de")
    assert (corpus.valid_every, corpus.merges) == (every, merges)
