"""The offset with which unknown words are replaced best."""

from __future__ import annotations

from pathlib import Path

import pytest
import sacrebleu

from fairseq_plugins.tools import cli
from fairseq_plugins.tools.generated import read_generated
from fairseq_plugins.tools.offsets import count_right

# A model that attends one word too early: Ann and Bob are to the right of what it looks at; at Cid it is right.
SOURCE = "the man Ann at once then saw Bob\nCid ran\n"
REFERENCE = "der Mann Anna sah Bob\nCid lief\n"
GENERATED = """\
T-1\t<<unk>> lief
H-1\t-0.5\t<unk> lief
D-1\t-0.5\t<unk> lief
P-1\t-0.5000 -0.5000 -0.5000
A-1\t0-0 1-1
H-1\t-0.6\t<unk> <unk> <unk>
D-1\t-0.6\t<unk> <unk> <unk>
P-1\t-0.5000 -0.5000 -0.5000 -0.5000
A-1\t1-0 1-1 1-2
S-0\tthe man <unk> saw <unk>
H-0\t-0.4\tder Mann <unk> sah <unk>
D-0\t-0.4\tder Mann <unk> sah <unk>
P-0\t-0.4000 -0.4000 -0.4000 -0.4000 -0.4000 -0.4000
A-0\t0-0 1-1 1-2 6-3 6-4
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (("source", SOURCE), ("reference", REFERENCE), ("out", GENERATED), ("dictionary", "Ann Anna\n")):
        (tmp_path / name).write_text(text)
    return tmp_path


def tune(folder: Path, *arguments: object) -> None:
    texts = ["--source", folder / "source", "--reference", folder / "reference"]
    cli.main(["tune-offset", str(folder / "out"), *map(str, [*texts, *arguments])])


def test_the_table_and_the_best(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tune(folder, "--dictionary", folder / "dictionary")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines[1:-1]] == ["-3", "-2", "-1", "+0", "+1", "+2", "+3"]
    # At 0: Cid; at 1: Anna and Bob; at 2 and beyond: Bob, the last word; before 0 there is nothing but Cid.
    assert [line[1] for line in lines[1:-1]] == ["1", "1", "1", "1", "2", "1", "1"]
    assert lines[5][2] == "66.7%"
    replaced = ["der Mann Anna sah Bob", "ran lief"]
    bleu = sacrebleu.corpus_bleu(replaced, [REFERENCE.splitlines()], tokenize="none", force=True)
    assert float(lines[5][3]) == pytest.approx(bleu.score, abs=0.005)
    assert " ".join(lines[-1]) == "best for 3 unknown words in 2 sentences: --attention-offset 1"


def test_words_are_copied_without_a_dictionary(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Then 0 and 1 are as good, and 0 wins, however they are ordered."""
    tune(folder, "--offsets", 2, 1, 0)
    *table, last = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[1] for line in table] == ["1", "1", "1"]
    assert last.endswith("--attention-offset 0")


def test_a_word_that_is_there_already_is_not_right(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (folder / "out").read_text().replace("sah <unk>", "Bob <unk>")
    (folder / "out").write_text(text)
    tune(folder, "--offsets", 1)
    assert capsys.readouterr().out.splitlines()[1].split()[1] == "0"


def test_only_words_that_were_unknown_are_counted() -> None:
    """And not the second of two that the reference has, where the translation has one of its own."""
    assert count_right(["der", "<unk>"], ["der", "x"], ["der", "der"]) == 0
    assert count_right(["der", "<unk>"], ["der", "der"], ["der", "der"]) == 1


def test_nothing_is_copied_from_an_empty_source(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tune(folder)
    before = capsys.readouterr().out.splitlines()[-1]
    for name, more in (("source", "\n"), ("reference", "the end\n")):
        (folder / name).write_text((folder / name).read_text() + more)
    text = GENERATED + "H-2\t-1\tthe <unk>\nD-2\t-1\tthe <unk>\nP-2\t-1 -1 -1\nA-2\t\n"
    (folder / "out").write_text(text)
    tune(folder)
    assert capsys.readouterr().out.splitlines()[-1].split("attention-offset")[1] == before.split("attention-offset")[1]


def test_alignments_are_read(folder: Path) -> None:
    best, other = read_generated([folder / "out"])[1].hypotheses
    assert (best.alignment, other.alignment) == ([0, 1], [1, 1, 1])


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("A-0\t0-0 1-1 1-2 6-3 6-4\n", "", "sentence 0 has no alignment of words"),
        ("A-0\t0-0", "A-0\t0.4,0.6", "sentence 0 has no alignment"),
        ("6-3 6-4\n", "6-3 8-4\n", "alignment of sentence 0 is not one of its 8 source and 5 target words"),
        (" 6-4\n", "\n", "alignment of sentence 0 is not one of its"),
        ("<unk>", "word", "no unknown word in the translations"),
    ],
)
def test_what_does_not_fit_is_refused(folder: Path, before: str, after: str, message: str) -> None:
    (folder / "out").write_text(GENERATED.replace(before, after))
    with pytest.raises(SystemExit, match=message):
        tune(folder)


def test_texts_of_other_lengths_are_refused(folder: Path) -> None:
    (folder / "reference").write_text("one line\n")
    with pytest.raises(SystemExit, match="reference has 1 lines, and 2 sentences were translated"):
        tune(folder)
