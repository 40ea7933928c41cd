"""The three files of the lexicon from known links and from eflomal, and refused input."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from fairseq.utils import load_align_dict

from fairseq_plugins.cli import lexicon
from tests.cli.conftest import refused, tool
from tests.commands import full_disk

# This stand-in for eflomal-align prints the links in the files beside it.
ALIGNER = f"""#!{sys.executable}
import pathlib, sys
for side in ("forward", "reverse"):
    links = pathlib.Path(__file__).with_name(side).read_text()
    pathlib.Path(sys.argv[sys.argv.index(f"--{{side}}-links") + 1]).write_text(links)
"""


def words(folder: Path, *options: object) -> list[object]:
    sides = ["--source", folder / "source", "--target", folder / "target"]
    return ["lexicon", *sides, "--output", folder / "lexicon", *options]


def make_lexicon(folder: Path, *options: object) -> None:
    tool(*words(folder, *options))


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (folder / "lexicon").iterdir()}


@pytest.fixture
def aligner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the stand-in in an environment's scripts folder, and set an empty PATH."""
    aligner = tmp_path / "bin" / "eflomal-align"
    aligner.parent.mkdir()
    monkeypatch.setattr(sys, "executable", str(aligner.with_name("python")))
    monkeypatch.setenv("PATH", "")
    aligner.write_text(ALIGNER)
    aligner.chmod(0o755)
    return aligner


@pytest.fixture
def corpus(tmp_path: Path, aligner: Path) -> Path:
    """Write three pairs, one of them empty, and their links."""
    (tmp_path / "source").write_text("a b C\n\nb b a\n", encoding="utf-8")
    (tmp_path / "target").write_text("x Y\n\nY x ä Y\n", encoding="utf-8")
    aligner.with_name("forward").write_text("0-0 1-1 2-1\n0-0 1-0 2-2\n")
    aligner.with_name("reverse").write_text("0-0\n1-0 0-3 1-1\n")
    return tmp_path


def test_the_files(corpus: Path) -> None:
    """Links: a to x twice and to ä once; b to Y five times and to x once; C to Y.  Y is most frequent, then x."""
    make_lexicon(corpus)
    assert contents(corpus) == {
        "dictionary.txt": b"C Y\na x\nb Y\n",
        "candidates.txt": "C Y 1\na x 0.666667\na ä 0.333333\nb Y 0.833333\nb x 0.166667\n".encode(),
        "frequent.txt": "Y 3\nx 2\nä 1\n".encode(),
    }
    assert load_align_dict(str(corpus / "lexicon" / "dictionary.txt")) == {"C": "Y", "a": "x", "b": "Y"}


def test_equally_likely_translations(corpus: Path, aligner: Path) -> None:
    """Ties are ordered by frequency, then by characters, and are truncated at the maximum number."""
    (corpus / "target").write_text("x z\n\nz x y w\n", encoding="utf-8")
    aligner.with_name("forward").write_text("0-0 0-1\n2-2 2-3\n")
    aligner.with_name("reverse").write_text("\n\n")
    make_lexicon(corpus, "--max-candidates", 3)
    assert contents(corpus)["frequent.txt"] == b"x 2\nz 2\nw 1\ny 1\n"
    assert contents(corpus)["candidates.txt"] == b"a x 0.25\na z 0.25\na w 0.25\n"
    assert contents(corpus)["dictionary.txt"] == b"a x\n"


def test_words_are_those_of_fairseq(corpus: Path) -> None:
    """Windows line ends, tabs, other white space and a missing last line end have no effect."""
    make_lexicon(corpus)
    plain = contents(corpus)
    (corpus / "source").write_bytes("a\tb \u2028C\r\n \r\nb\x0b b\u00a0a\r\n".encode())
    (corpus / "target").write_bytes(" x Y\n\nY x ä\x85Y".encode())
    make_lexicon(corpus)
    assert contents(corpus) == plain


@pytest.mark.parametrize(
    ("source", "target", "place"),
    [
        (b"a\n", b"x\ny\nz\n", "target has 3 .*source has 1"),
        (b"a\nb\nc", b"x\n", "source has 3 .*target has 1"),
        (b"a\nb\n", b"x\n \n", "target, line 2: "),
        (b"a\nb\n", b"x\n\xff\n", "target, line 2: "),
        (b"a\nb\rc\n", b"x\ny\n", "source, line 2: "),
        (b"a\n\0\n", b"x\ny\n", "source, line 2: "),
    ],
)
def test_corrupt_input_is_refused_before_anything_is_written(corpus, source, target, place) -> None:
    (corpus / "source").write_bytes(source)
    (corpus / "target").write_bytes(target)
    with pytest.raises(SystemExit, match=place):
        make_lexicon(corpus)
    assert not (corpus / "lexicon").exists()


def test_a_file_at_the_path_of_the_folder_is_kept(corpus: Path) -> None:
    (corpus / "lexicon").write_text("precious")
    assert "--output" in refused(*words(corpus))
    assert (corpus / "lexicon").read_text() == "precious"


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("echo first >&2; seq 1 9 >&2; exit 3", r"eflomal-align .* 3; .*:\n5\n6\n7\n8\n9$"),
        ('echo 0-0 >"$7"; echo 0-0 >"$9"', "eflomal-align"),
        (r'printf "\n\n" >"$7"; printf "\n\n" >"$9"', "eflomal-align"),
        (r'printf "\n\n\n" >"$7"; printf "0-0\n\n" >"$9"', "eflomal-align"),
        (r'printf "0-0\n0-4\n" >"$7"; printf "\n\n" >"$9"', "line 2 .*'0-4'"),
        (r'printf "0-0 -1-0\n\n" >"$7"; printf "\n\n" >"$9"', "line 1 .*'-1-0'"),
    ],
)
def test_a_failure_of_the_aligner_leaves_the_old_lexicon(corpus, aligner, program, message) -> None:
    make_lexicon(corpus)
    old = contents(corpus)
    aligner.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{program}\n")
    with pytest.raises(SystemExit, match=message):
        make_lexicon(corpus)
    assert contents(corpus) == old


def test_a_full_disk_leaves_the_old_lexicon(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_lexicon(corpus)
    old = contents(corpus)
    monkeypatch.setattr(lexicon, "contents", lambda *_: [["x" * 300], ["x"], ["x"]])
    with full_disk(200):
        assert f"lexicon/{lexicon.FILES[0]} " in refused(*words(corpus))
    assert contents(corpus) == old


@pytest.mark.parametrize("path", ["", ":", "nowhere::"])
def test_a_program_in_the_working_folder_is_not_run(corpus, aligner, monkeypatch, path) -> None:
    monkeypatch.setattr(sys, "executable", str(corpus / "python"))
    monkeypatch.setenv("PATH", path)
    monkeypatch.chdir(aligner.parent)
    assert "eflomal-align" in refused(*words(corpus))
    assert not (corpus / "lexicon").exists()


def test_eflomal_finds_the_translations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """300 sentences are translated word by word, with swapped neighbours and an article before every third word."""
    try:
        lexicon.find_aligner()
    except ValueError as error:
        pytest.skip(str(error))
    generator = random.Random(1)
    with (tmp_path / "source").open("w") as source, (tmp_path / "target").open("w") as target:
        for _ in range(300):
            chosen = generator.sample(range(60), generator.randint(3, 9))
            translations = list(chosen)
            for place in range(0, len(chosen) - 1, 2):
                if generator.random() < 0.5:
                    translations[place : place + 2] = reversed(translations[place : place + 2])
            print(*(f"Word{word}" for word in chosen), file=source)
            print(*(f"the Wort{word}" if word % 3 == 0 else f"Wort{word}" for word in translations), file=target)
        # The sentence has a word more than eflomal accepts; links of other sentences must not shift.
        print(*["long"] * 1024, "\nWord1", file=source)
        print(*["lang"] * 1024, "\nWort1", file=target)
    make_lexicon(tmp_path)
    assert "1 of 302" in capsys.readouterr().err
    dictionary = load_align_dict(str(tmp_path / "lexicon" / "dictionary.txt"))
    assert dictionary == {f"Word{word}": f"Wort{word}" for word in range(60)}
