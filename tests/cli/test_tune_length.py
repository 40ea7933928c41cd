"""Tuning of the length penalty from n-best lists, and parsing of fairseq's output."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import sacrebleu

from fairseq_plugins.cli.generated import read_generated
from fairseq_plugins.cli.tune_length import best_texts
from tests.cli.conftest import refused, tool
from tests.commands import QUIET, USER_DIR, hypotheses, run

# The lists' hypotheses have two tokens of 1 bit, and five of 0.6: the short one is better while 2 / 2^A < 3 / 5^A.
BOUNDARY = math.log(1.5) / math.log(2.5)  # 0.44
TOY = """\
2026-01-01 00:00:00 | INFO | fairseq.tasks.translation | [src] dictionary: 8 types
S-0\tx y
T-0\ta b c d
H-0\t-1.0\ta
D-0\t-1.0\ta
P-0\t-1.0000 -1.0000
H-0\t-0.6\ta b c d
D-0\t-0.6\ta b c d
P-0\t-0.6000 -0.6000 -0.6000 -0.6000 -0.6000
"""
TOY_1 = TOY.replace("-0\t", "-1\t")
END = "Generate test with beam=5: BLEU4 = 1.00\n"


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    path = tmp_path / "toy.txt"
    path.write_text(TOY_1 + TOY + END)
    return path


def tune(*arguments: object) -> None:
    tool("tune-length", *arguments)


def test_a_larger_penalty_prefers_longer_sentences(toy: Path) -> None:
    sentences = read_generated([toy])
    for alpha in (-1, 0, BOUNDARY - 1e-6):
        assert best_texts(sentences, alpha) == ["a", "a"]
    for alpha in (BOUNDARY + 1e-6, 1, 2):
        assert best_texts(sentences, alpha) == ["a b c d", "a b c d"]


def test_the_table_and_the_best(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tune(toy)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == [f"{tenths / 10:g}" for tenths in range(21)]
    assert lines[5].split() == ["0.4", "0", "0.00", "0.250"]
    assert lines[6].split() == ["0.5", "0", "100.00", "1.000"]
    assert lines[-1].endswith(": --lenpen 1")  # of the best, the closest to fairseq's default
    tune(toy, "--alphas", 2, 1.5, 0)
    assert capsys.readouterr().out.endswith(": --lenpen 1.5\n")


def test_a_penalty_of_words(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The long hypothesis has four words, three more than the short one, and its log-probability is lower by ln 2."""
    _, long = read_generated([toy])[0].hypotheses
    assert long.score(1, word_penalty=0.5) == pytest.approx((-3 * math.log(2) + 0.5 * 4) / 5)
    tune(toy, "--alphas", 0, "--word-penalties", 0.5, 0.3, math.log(2) / 3 + 1e-6, math.log(2) / 3 - 1e-6, -1)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines[1:-1]] == ["100.00", "100.00", "100.00", "0.00", "0.00"]
    assert lines[-1].endswith(": --lenpen 0 --task translation_fast --word-penalty=0.23105")


@pytest.mark.parametrize(("words", "is_raw"), [("a b c d", False), ("(a) b.", False), ("(a) b.", True)])
def test_references_are_tokenised_if_fairseq_has_detokenised(toy, capsys, words, is_raw) -> None:
    """fairseq detokenises both references and translations, or neither; a file of references is tokenised."""
    text = TOY.replace("D-0\t-0.6\ta b c d", "D-0\t-0.6\t(a) b.").replace("T-0\ta b c d", "T-0\t(a) b!")
    toy.write_text(text.replace("a b c d", words))
    reference = toy.with_name("reference")
    reference.write_text("(a) b!\n")
    tune(toy, "--alphas", 1, *(["--reference", reference] if is_raw else []))
    tokens = ("(a) b.", "(a) b!") if words == "(a) b." and not is_raw else ("( a ) b .", "( a ) b !")
    expected = sacrebleu.corpus_bleu([tokens[0]], [[tokens[1]]], tokenize="none", force=True)
    assert capsys.readouterr().out.splitlines()[1].split() == ["1", "0", f"{expected.score:.2f}", "1.000"]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_line_ends_where_fairseq_ends_it(end: str, toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All files may have Windows line ends; a carriage return inside a line does not end the line."""
    toy.write_bytes(TOY.replace("a b c d\n", "a b\u2028c\rd\n").replace("\n", end).encode())
    (sentence,) = read_generated([toy])
    assert sentence.hypotheses[1].words == sentence.reference == "a b\u2028c\rd"
    reference = toy.with_name("reference")
    reference.write_bytes(f"a b\u2028c\rd{end}".encode())
    tune(toy, "--reference", reference, "--alphas", 1)
    assert capsys.readouterr().out.splitlines()[1].split() == ["1", "0", "100.00", "1.000"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TOY[:-10], "line 9: "),
        (TOY[: TOY.rindex("P-")], "line 8: sentence 0 "),
        (TOY[: TOY.index("H-0\t-0.6")], "GENERATED"),
        (END, "toy.txt"),
        (TOY + TOY_1 + TOY, "toy.txt: sentence 0 "),
        (TOY.replace("-1.0000 -1.0000", "-1.0000 x"), "line 6: "),
        (TOY.replace("-1.0000 -1.0000", "-1.0000 nan"), "line 6: "),
        (TOY + "A-0\t0-0\nA-0\t0-0\n", "line 11: sentence 0 "),
        (TOY.replace("T-0", "U-0"), "GENERATED"),
    ],
)
def test_files_without_nbest_lists_are_refused(toy: Path, text: str, message: str) -> None:
    toy.write_text(text)
    assert message in refused("tune-length", toy)


def test_options_that_do_not_fit_are_refused(toy: Path) -> None:
    assert "sentence 1 " in refused("tune-length", toy, toy)
    assert __file__ in refused("tune-length", toy, "--reference", __file__)
    for words in (["--alphas", "nan"], ["--alphas", "0", "1e6"], ["--word-penalties", "nan"]):
        assert words[0] in refused("tune-length", toy, *words)


def test_scores_are_those_of_fairseq(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the search's own penalty, scores equal the printed ones."""
    training = ["--optimizer", "adam", "--lr", 0.003, "--batch-size", 16, "--max-epoch", 6, "--no-epoch-checkpoints"]
    run("train", data, "--user-dir", USER_DIR, "--arch", "convs2s_tiny", *training, *QUIET, "--save-dir", tmp_path)
    search = ["--sampling", "--beam", 4, "--nbest", 4, "--max-len-b", 12, "--lenpen", 0.4, "--results-path", tmp_path]
    run("generate", data, "--user-dir", USER_DIR, "--path", tmp_path / "checkpoint_last.pt", *search)
    path = tmp_path / "generate-test.txt"
    printed = hypotheses(path.read_text())
    sentences = read_generated([path])
    assert [sentence.number for sentence in sentences] == list(range(16))
    for sentence in sentences:
        assert len(sentence.hypotheses) == 4
        for hypothesis, (score, words) in zip(sentence.hypotheses, printed[sentence.number], strict=True):
            n = hypothesis.length
            assert hypothesis.words == words
            # Each of the n scores is rounded to 4 decimals.
            assert hypothesis.score(0.4) / math.log(2) == pytest.approx(score, abs=n**0.6 * 5e-5 + 1e-5)
    tune(path)
    assert "sentences: --lenpen" in capsys.readouterr().out
