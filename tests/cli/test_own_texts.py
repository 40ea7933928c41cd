"""Texts for ``own-data``: pairing of files and folders, languages in their names, and segmentation."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from fairseq_plugins.cli.own_data.cleaning import FilePair, languages_of, pair_up, read_pairs
from fairseq_plugins.cli.own_data.command import texts_of
from fairseq_plugins.cli.own_data.folder import Folder
from fairseq_plugins.cli.own_data.preparation import merges_for, prepare, source_segmenter
from tests.cli.conftest import parse


def described(*words: Path | str) -> tuple[tuple[str, str], list[FilePair]]:
    """Return the languages and the training files of a call with these paths and options."""
    args = parse(*words, "out")
    files = texts_of(args)["train"]
    languages = languages_of(*files, args.source_lang, args.target_lang)
    return languages, pair_up(*files, languages)


def test_folders_are_paired_by_name(texts: Path, tmp_path: Path) -> None:
    """Names may have dots, like news.2013.en and news.2014.en; hidden files are skipped."""
    names = ["b.txt", "news.2013.{}", "news.2014.{}.gz", "old.de.{}", "talks.{}.txt"]
    for language in ("en", "de"):
        (tmp_path / language / "old").mkdir(parents=True)
        (tmp_path / language / ".DS_Store").write_bytes(b"\xff")
        content = (texts / f"train.{language}").read_bytes()
        for name in reversed(names):
            path = tmp_path / language / name.format(language)
            path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    languages, files = described(tmp_path / "en", tmp_path / "de")
    assert languages == ("en", "de")
    assert files == [tuple(tmp_path / side / name.format(side) for side in languages) for name in names]
    assert len(list(read_pairs(files, languages))) == 5 * 300
    with pytest.raises(ValueError, match=r"en and .*b\.txt"):
        described(tmp_path / "en", tmp_path / "de" / "b.txt", "--target-lang", "de")
    (tmp_path / "de" / "b.txt").unlink()
    with pytest.raises(ValueError, match=r"en/b\.txt"):
        described(tmp_path / "en", tmp_path / "de")
    (tmp_path / "en" / "news.2013.en.gz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"news.2013.en and .*news.2013.en.gz"):
        described(tmp_path / "en", tmp_path / "de")


def test_names_that_end_in_other_letters(texts: Path, tmp_path: Path) -> None:
    for language, end in (("en", "eng"), ("de", "ger"), ("pt", "pt-BR")):
        text = texts / f"train.{'en' if language == 'en' else 'de'}"
        (tmp_path / language).mkdir()
        (tmp_path / language / f"news.2013.{end}").write_text(text.read_text())
    assert len(described(tmp_path / "en", tmp_path / "de")[1]) == 1
    assert len(described(tmp_path / "en", tmp_path / "pt", "--target-lang", "pt-BR")[1]) == 1
    for name in ("src_text", "train.de-en", "my_data", "tok_en", "my.txt", "test.sgm", "a.tmx", "po.po"):
        (tmp_path / name).touch()
        with pytest.raises(ValueError, match="--source-lang"):
            described(tmp_path / name, tmp_path / "de")
    file = tmp_path / "pt" / "news.2013.pt-BR"
    assert described(tmp_path / "en" / "news.2013.eng", file)[0] == ("eng", "pt-BR")


@pytest.mark.parametrize("name", ["{}", "a.{}", "a.{}.gz", "a.{}.txt", "newstest2014-src.{}.sgm", "a.{}.xml.gz"])
@pytest.mark.parametrize("language", ["zh", "pt-BR", "zh_TW", "sr-Latn", "fil"])
def test_names_that_end_in_a_language(name: str, language: str) -> None:
    assert languages_of(Path(name.format(language)), Path("a.en"), None, None) == (language, "en")


@pytest.mark.parametrize("name", ["a.tmx", "a.TMX", "a.tmx.gz"])
def test_one_file_of_both_languages(name: str, tmp_path: Path) -> None:
    """A translation memory contains both languages, so options must name them, also for a folder."""
    unit = "<tu><tuv xml:lang='en-US'><seg>one</seg></tuv><tuv xml:lang='RO'><seg>unu</seg></tuv></tu>"
    content = f"<tmx><body>{unit * 3}</body></tmx>".encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    for source in (tmp_path / name, tmp_path):
        languages, files = described(source, "--source-lang", "en", "--target-lang", "ro")
        assert list(read_pairs(files, languages)) == [("one", "unu")] * 3
        with pytest.raises(ValueError, match="--source-lang"):
            described(source)
    (tmp_path / "a.en").write_text("one\n")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="--target-lang"):
        described(tmp_path / "a.en")
    (tmp_path / "link").symlink_to("a.en")
    for target in ("a.en", "link", "pipe"):  # twice the same language, and a target that can be read only once
        with pytest.raises(ValueError, match="one language" if target != "pipe" else "pipe"):
            pair_up(tmp_path / "a.en", tmp_path / target, ("en", "ro"))
    (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=str(tmp_path)):
        described(tmp_path, "--source-lang", "en", "--target-lang", "ro")


def test_another_text_under_the_same_name(tmp_path: Path) -> None:
    def prepared(place: Path) -> None:
        languages, files = described(place / "a.en", place / "a.de")
        prepare(Folder(tmp_path / "out", languages, "sentencepiece"), {"train": files})

    for language, text in (("en", "A dog and {} boats."), ("de", "Ein Hund und {} Boote.")):
        (tmp_path / f"a.{language}").write_text("".join(f"{text.format(n)}\n" for n in range(300)))
    prepared(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    moved = tmp_path / "moved"
    moved.mkdir()
    for language in ("en", "de"):
        (tmp_path / f"a.{language}").rename(moved / f"a.{language}")
    prepared(moved)
    assert {path: path.stat().st_mtime_ns for path in before} == before, "a project may move"
    (moved / "a.de").write_text((moved / "a.de").read_text().replace("Hund", "Bund"))
    with pytest.raises(ValueError, match="/out "):
        prepared(moved)


def test_moses_tokens(texts: Path, tmp_path: Path) -> None:
    """All parts are split into Moses tokens and subword-nmt's subwords, which fairseq's commands join again."""
    folder = Folder(tmp_path / "out", ("en", "de"), "moses")
    prepare(folder, {part: [(texts / f"{part}.en", texts / f"{part}.de")] for part in ("train", "test")}, workers=2)
    segment = source_segmenter(folder)
    for part in ("train", "valid", "test"):
        text, segmented = (path.read_text().splitlines() for path in (folder.text(part)[0], folder.segmented(part)[0]))
        assert segmented == [segment(line) for line in text]
        assert " @-@ " in "".join(segmented)
    assert (folder.binary / "dict.en.txt").exists()
    assert folder.decoding_options(tmp_path, tmp_path)[-6:-2] == ["--tokenizer", "moses", "--bpe", "subword_nmt"]


def test_the_number_of_merges_depends_on_the_size() -> None:
    assert [merges_for(pairs) for pairs in (300, 29_000, 160_000, 4_500_000)] == [2000, 6000, 10_000, 40_000]
