"""``fairseq-plugins score`` compared with sacreBLEU and rouge-score on the same text."""

from __future__ import annotations

import statistics
from importlib.util import find_spec
from pathlib import Path

import pytest
import sacrebleu

from tests.cli.conftest import refused, tool

TEXTS = ["The cat's on the mat, asleep.", "Eleven dogs were running to the well-known river bank yesterday", "À car."]
TOKENS = ["The cat 's on the mat , asleep .", *TEXTS[1:2], "À car ."]
REFERENCES = ["The cat's on a mat asleep.", "Eleven dogs ran to the river bank", "A red car."]
SECOND = ["A cat is asleep on the mat.", "The dogs ran to the bank of the river yesterday", "It is a car."]
REFERENCE_TOKENS = ["The cat 's on a mat asleep .", REFERENCES[1], "A red car ."]


def generated(path: Path, numbers: list[int], texts: list[str] = TEXTS, tokens: list[str] = TOKENS) -> str:
    lines = []
    for number in numbers:
        for text, words in ((texts[number], tokens[number]), ("worse", "worse")):
            scores = " ".join(["-0.5"] * (len(words.split()) + 1))
            lines += [f"H-{number}\t-0.1\t{words}", f"D-{number}\t-0.1\t{text}", f"P-{number}\t{scores}"]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    for name, lines in (("first", REFERENCES), ("second", SECOND), ("tokens", REFERENCE_TOKENS)):
        (tmp_path / name).write_text("".join(line + "\n" for line in lines))
    shards = {"shard0": generated(tmp_path / "shard0", [2, 0]), "shard1": generated(tmp_path / "shard1", [1])}
    other = generated(tmp_path / "other", [0, 1, 2], [*TEXTS[:2], "It."], [*TOKENS[:2], "It ."])
    return {**{name: str(tmp_path / name) for name in ("first", "second", "tokens")}, **shards, "other": other}


@pytest.mark.parametrize("lowercase", [False, True])
def test_bleu_is_sacrebleus(files: dict[str, str], tmp_path: Path, capsys, lowercase: bool) -> None:
    """Scores equal sacreBLEU's for shards, for the first of two hypotheses, and lower-cased as in IWSLT'14."""
    texts, tokens = ([line.lower() for line in lines] if lowercase else lines for lines in (TEXTS, TOKENS))
    shards = [generated(tmp_path / "a", [2, 0], texts, tokens), generated(tmp_path / "b", [1], texts, tokens)]
    options = ["--lowercase"] if lowercase else []
    references = ["--reference", files["first"], "--tokenised", files["tokens"]]
    tool("score", "--generated", *shards, *options, *references)
    detokenised, tokenised = capsys.readouterr().out.splitlines()
    signature, _, value = detokenised.partition("): ")
    expected = sacrebleu.corpus_bleu(texts, [REFERENCES], lowercase=lowercase).score
    assert float(value) == pytest.approx(expected, abs=0.005)
    assert f"|case:{'lc' if lowercase else 'mixed'}|eff:no|tok:13a|" in signature
    plain = {"lowercase": lowercase, "tokenize": "none", "force": True}
    expected = sacrebleu.corpus_bleu(tokens, [REFERENCE_TOKENS], **plain).score
    assert float(tokenised.removeprefix("tokenised BLEU: ")) == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize("tokenize", ["13a", "char"])
def test_tokens_are_detokenised(tmp_path: Path, files: dict[str, str], tokenize: str, capsys) -> None:
    run = ["--generated", generated(tmp_path / "tokens.txt", [0, 1, 2], TOKENS, TOKENS)]
    tool("score", *run, "--reference", files["first"], "--detokenise", "en", "--tokenize", tokenize)
    expected = sacrebleu.corpus_bleu(TEXTS, [REFERENCES], tokenize=tokenize).score
    assert float(capsys.readouterr().out.partition("): ")[2]) == pytest.approx(expected, abs=0.005)


def test_the_mean_of_runs(files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    runs = ["--generated", files["shard0"], files["shard1"], "--generated", files["other"]]
    tool("score", *runs, "--reference", files["first"])
    values, _, mean = capsys.readouterr().out.partition("): ")[2].partition("   mean ")
    expected = [sacrebleu.corpus_bleu(texts, [REFERENCES]).score for texts in (TEXTS, [*TEXTS[:2], "It."])]
    assert [float(value) for value in values.split()] == pytest.approx(expected, abs=0.005)
    assert float(mean) == pytest.approx(statistics.mean(expected), abs=0.005)


@pytest.mark.parametrize("limit", [None, 5, 20])
def test_rouge_is_that_of_rouge_score(files, capsys, limit) -> None:
    """For each sentence, rouge-score uses the better of two references; five bytes of À car. end before the r."""
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rouge1", "rouge2", "rougeL"], True)
    options = [] if limit is None else ["--bytes", str(limit)]
    run = ["--generated", files["shard0"], files["shard1"]]
    tool("score", "--rouge", *run, *options, "--reference", files["first"], files["second"])
    found = dict(line.split(": ") for line in capsys.readouterr().out.splitlines())
    assert len(found) == 6
    for name in ("rouge1", "rouge2", "rougeL"):
        for part, field in (("recall", "recall"), ("F1", "fmeasure")):
            # The library chooses the reference by F1 for all figures.
            best = [
                max(
                    (scorer.score(each, text.encode()[:limit].decode())[name] for each in pair),
                    key=lambda score: score.fmeasure,
                )
                for text, *pair in zip(TEXTS, REFERENCES, SECOND, strict=True)
            ]
            expected = 100 * statistics.mean(getattr(score, field) for score in best)
            assert float(found[f"{name} {part}"]) == pytest.approx(expected, abs=0.005)


def test_incompatible_files_and_options_are_refused(files: dict[str, str], tmp_path: Path) -> None:
    """ROUGE knows the letters a to z."""
    (tmp_path / "russian").write_text("\u0434\u0430\n" * 3, encoding="utf-8")
    assert "--rouge" in refused("score", "--rouge", "--generated", files["other"], "--reference", tmp_path / "russian")
    assert "first has 3 " in refused("score", "--generated", files["shard1"], "--reference", files["first"])
    latin1 = tmp_path / "latin1"
    latin1.write_bytes(b"x\n\xdf\n")
    for generated, reference in ((latin1, files["first"]), (files["other"], latin1)):
        assert "latin1, line 2" in refused("score", "--generated", generated, "--reference", reference)
    for words, name in (
        (["--rouge", "--lowercase"], "--lowercase"),
        (["--rouge", "--tokenised", files["first"]], "--tokenised"),
        (["--rouge", "--tokenize", "zh"], "--tokenize"),
        *([] if find_spec("mecab_ko") else [(["--tokenize", "ko-mecab"], "sacrebleu[ko]")]),
        (["--reference", files["first"], files["second"]], "--rouge"),
    ):
        assert name in refused("score", "--generated", files["other"], "--reference", files["first"], *words)
