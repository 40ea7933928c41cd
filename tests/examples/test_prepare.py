"""Preparation of a corpus: downloads, the order of the steps, and resuming."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from dataclasses import replace
from pathlib import Path

import corpus
import pytest
from corpus import Corpus, prepare
from downloads import fetch, text
from experiments import CORPORA

from tests.commands import ROOT, script
from tests.examples.conftest import Server, url


@pytest.fixture(autouse=True)
def no_binarising(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "binarise", lambda *arguments: arguments[2].mkdir())


def fetch_all(described: Corpus, orig: Path) -> None:
    fetch([*described.files()], orig, [*described.files()])


def archive(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def small(server: Server, **options: object) -> Corpus:
    """Describe a corpus with a training text in an archive, and a test text without one."""
    rows = [f"word{number % 7} tail {number}" for number in range(60)]
    lines = "".join(row + "\n" for row in rows).encode()
    server.files["/train.tgz"] = archive({"./in/train.en": lines, "in/train.de": lines.upper(), "../evil": b"x"})
    for language in ("en", "de"):
        server.files[f"/test.{language}"] = lines
    train = text("in/train.{}", ("en", "de"), url(server, "train.tgz"))
    tests = (text("test.{}", ("en", "de"), url(server, "test.{}")),)
    return Corpus("en", "de", train=train, tests=tests, tokenise={}, merges=20, valid_every=10, **options)  # type: ignore[arg-type]


def test_archives_of_one_name(server: Server, tmp_path: Path) -> None:
    """Archives such as wmt15/test.tgz and wmt13/test.tgz share a name, also after one of them has been unpacked."""
    texts = {}
    for folder in ("wmt13", "wmt15"):
        server.files[f"/{folder}/test.tgz"] = archive({f"{folder}.en": folder.encode(), f"{folder}.de": b"x"})
        texts[folder] = text(folder + ".{}", ("en", "de"), url(server, f"{folder}/test.tgz"))
    corpus = Corpus("en", "de", train=texts["wmt13"], tests=(texts["wmt15"],))
    for missing in ("wmt13.en", "wmt15.en"):
        fetch_all(corpus, tmp_path)
        assert {path.name for path in tmp_path.glob("*.tgz")} == {"wmt13-test.tgz", "wmt15-test.tgz"}
        assert [(tmp_path / f"{folder}.en").read_text() for folder in texts] == list(texts)
        (tmp_path / missing).unlink()
    asked = len(server.asked)
    fetch([*corpus.files()], tmp_path, texts["wmt15"][0])  # names do not change if one archive is not needed
    assert len(server.asked) == asked


def test_only_what_is_missing_is_fetched(server: Server, tmp_path: Path) -> None:
    described = small(server)
    orig = tmp_path / "orig"
    orig.mkdir()
    (orig / "test.en").write_text("mine\n")
    fetch_all(described, orig)
    assert (orig / "test.en").read_text() == "mine\n"
    assert (orig / "in" / "train.de").read_text().startswith("WORD0 TAIL 0\n")
    assert len(server.asked) == 2  # the archive is fetched once, and test.de
    assert (orig / "train.tgz").exists()
    assert not (tmp_path / "evil").exists()
    fetch_all(described, orig)
    assert len(server.asked) == 2


def test_a_truncated_archive_leaves_no_text(server: Server, tmp_path: Path) -> None:
    """Half a text with the name of a whole one would be used at the next start; a missing text is named."""
    described = small(server)
    content = archive({"in/train.en": os.urandom(100_000), "in/train.de": b"x"})
    server.files["/train.tgz"] = content[: len(content) // 2]
    with pytest.raises(ValueError, match=r"train\.tgz"):
        fetch_all(described, tmp_path)
    assert not (tmp_path / "in" / "train.en").exists()
    (tmp_path / "train.tgz").write_bytes(archive({"in/train.en": b""}))
    with pytest.raises(ValueError, match=r"in/train\.de"):
        fetch_all(described, tmp_path)


def test_tokens_of_talks() -> None:
    """The talks of IWSLT are lowercased, and their words are not split at hyphens."""
    assert corpus.moses("en", normalise=False, **CORPORA["iwslt14_de_en"].tokenise)("Well-known X") == "well-known x"


def test_an_interrupted_preparation_resumes(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped within any step, the preparation gives the same text, and repeats no finished step."""
    described = small(server)
    for name in ("straight", "stopped"):
        (tmp_path / name / "orig").mkdir(parents=True)
    prepare(described, tmp_path / "straight", tmp_path / "straight" / "orig")

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    steps = ["tokenise", "clean_and_split", "segment", "binarise"]
    out = tmp_path / "stopped"
    for step in steps:
        with monkeypatch.context() as patch:
            patch.setattr(corpus, step, stop)
            with pytest.raises(KeyboardInterrupt):
                prepare(described, out, out / "orig")
    before = {path: path.stat().st_ino for path in out.rglob("*.en") if path.parent != out / "orig"}
    (out / "train.en").rename(out / "train.en.partial")  # as if segmenting this file had been stopped
    prepare(described, out, out / "orig")
    again = {path.relative_to(out).as_posix() for path, inode in before.items() if path.stat().st_ino != inode}
    assert again <= {"train.en", "tmp/test.en"}
    names = sorted(path.relative_to(out) for path in out.rglob("*") if path.is_file() and path.suffix != ".partial")
    made = {"code", "train.en", "valid.de", "test.de", "tmp/valid.en", "test.reference"}
    assert {str(name) for name in names} >= made
    for name in names:
        assert (out / name).read_bytes() == (tmp_path / "straight" / name).read_bytes(), name


def test_other_text_under_the_same_names(tmp_path: Path) -> None:
    """Texts without checksums are compared; a project may be moved, and records of earlier versions are accepted."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for language in ("en", "de"):
            (tmp_path / name / f"text.{language}").write_text(f"word {name}\n" * 40)
    texts = text("text.{}", ("en", "de"))
    described, out = Corpus("en", "de", train=texts, tests=(texts,), valid_every=10, merges=2), tmp_path / "out"
    binary = prepare(described, out, tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "moved")
    (tmp_path / "moved" / "text.en.gz").write_bytes(gzip.compress((tmp_path / "moved" / "text.en").read_bytes()))
    (tmp_path / "moved" / "text.en").unlink()
    for orig in ("moved", "gone"):
        assert prepare(described, out, tmp_path / orig) == binary
    (tmp_path / "moved" / "text.en").write_text("word a\n" * 40)
    for other, orig in ((described, "b"), (replace(described, max_words=9), "moved")):
        with pytest.raises(ValueError, match=f"{out} "):
            prepare(other, out, tmp_path / orig)
    (out / "settings").write_text(f"{described}\n")
    binary.rmdir()
    for _ in range(2):
        assert prepare(described, out, tmp_path / "moved") == binary
    assert (out / "settings").read_text() == f"{described}\n", "which texts the tokens are of is not known"


@pytest.mark.parametrize(
    ("option", "train", "test"),
    [
        ("normalise", "&quot; it &apos;s &quot;", "\u201c it \u2019 s \u201d"),
        ("straight_apostrophes", "\u201c it \u2019 s \u201d", "\u201c it &apos;s \u201d"),
    ],
)
def test_punctuation(server: Server, tmp_path: Path, option: str, train: str, test: str) -> None:
    """As in fairseq's scripts, options change only training text or only test parts, and references stay unchanged."""
    line = "\u201cit\u2019s\u201d\n"
    (tmp_path / "in").mkdir()
    for path in ("in/train.en", "in/train.de", "test.en", "test.de"):
        (tmp_path / path).write_text(line * 30)
    prepare(small(server, **{option: True}), out := tmp_path / "out", tmp_path)
    for part, tokens in (("train", train), ("test", test)):
        assert (out / "tmp" / f"{part}.en").read_text().splitlines()[0] == tokens
    assert (out / "test.reference").read_text() == line * 30
    assert CORPORA["iwslt14_de_en"].straight_apostrophes


def test_pairs_are_cleaned(tmp_path: Path) -> None:
    """Both sides of a pair must have 1 to 4 words, and similar lengths."""
    lengths = [(0, 1), (1, 1), (2, 3), (2, 4), (3, 4), (4, 5)]
    for language, side in zip(("en", "de"), zip(*lengths, strict=True), strict=True):
        corpus.tokens_of(tmp_path, "train", 0, language).write_text("".join("w " * n + "\n" for n in side))
    described = Corpus("en", "de", train=text("x.{}", ("en", "de")), tests=(), max_words=4, max_ratio=1.5)
    kept = [tuple(len(side.split()) for side in pair) for pair in corpus.clean_pairs(described, "train", tmp_path)]
    assert kept == [(1, 1), (2, 3), (3, 4)]


def test_every_nth_pair_is_held_out_and_none_is_lost(server: Server, tmp_path: Path) -> None:
    (tmp_path / "orig").mkdir()
    prepare(small(server), tmp_path, tmp_path / "orig")
    train, valid = ((tmp_path / "tmp" / f"{part}.en").read_text().splitlines() for part in ("train", "valid"))
    original = (tmp_path / "orig" / "in" / "train.en").read_text().splitlines()
    assert valid == original[9::10]
    assert sorted(train + valid) == sorted(original)
    restored = (tmp_path / "train.de").read_text().replace("@@ ", "")
    assert restored == (tmp_path / "tmp" / "train.de").read_text()


def test_sides_of_a_test_part_have_equally_many_lines(server: Server, tmp_path: Path) -> None:
    described = small(server)
    server.files["/test.de"] += b"one more\n"
    with pytest.raises(ValueError, match=r"test\.de"):
        prepare(described, tmp_path, tmp_path / "orig")


def test_existing_files_are_refused(server: Server, tmp_path: Path) -> None:
    for name in ("code", "data-bin", "train.en", "valid.de", "test.reference", "tmp"):
        out = tmp_path / name
        out.mkdir()
        (out / name).write_text("mine")
        with pytest.raises(ValueError, match=f"{out / name} "):
            prepare(small(server), out, tmp_path / "orig")


def test_the_error_names_missing_files_and_folders(tmp_path: Path) -> None:
    for words, named in (
        (["gigaword", tmp_path], "/orig/sumdata/train/train.article.txt"),
        (["iwslt14_de_en", tmp_path / "out", "--orig", tmp_path / "mistyped"], "/mistyped"),
    ):
        assert named in script(ROOT / "examples" / "prepare" / "__main__.py", *words).stderr
