"""``fairseq-plugins score`` compared with sacreBLEU and rouge-score on the same text."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
import sacrebleu

from fairseq_plugins.cli import main as cli

TEXTS = ["The cat's on the mat, asleep.", "Eleven dogs were running to the well-known river bank yesterday", "A car."]
TOKENS = ["The cat 's on the mat , asleep .", *TEXTS[1:2], "A car ."]
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
    cli.main(["score", "--generated", *shards, *options, *references])
    detokenised, tokenised = capsys.readouterr().out.splitlines()
    signature, _, value = detokenised.partition("): ")
    expected = sacrebleu.corpus_bleu(texts, [REFERENCES], lowercase=lowercase).score
    assert float(value) == pytest.approx(expected, abs=0.005)
    assert f"|case:{'lc' if lowercase else 'mixed'}|eff:no|tok:13a|" in signature
    plain = {"lowercase": lowercase, "tokenize": "none", "force": True}
    expected = sacrebleu.corpus_bleu(tokens, [REFERENCE_TOKENS], **plain).score
    assert float(tokenised.removeprefix("tokenised BLEU: ")) == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize("tokenize", ["13a", "zh"])
def test_text_without_spaces(tmp_path: Path, tokenize: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = "\u6211\u4eec\u4eca\u5929\u53bb\u5403\u996d"
    (tmp_path / "reference").write_text(f"{line}\n", encoding="utf-8")
    run = ["--generated", generated(tmp_path / "run", [0], [line], [line])]
    cli.main(["score", *run, "--reference", str(tmp_path / "reference"), "--tokenize", tokenize])
    assert capsys.readouterr().out.rstrip().endswith(": 100.00" if tokenize == "zh" else ": 0.00")


def test_tokens_are_detokenised(tmp_path: Path, files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    run = ["--generated", generated(tmp_path / "tokens.txt", [0, 1, 2], TOKENS, TOKENS)]
    cli.main(["score", *run, "--reference", files["first"], "--detokenise", "en"])
    expected = sacrebleu.corpus_bleu(TEXTS, [REFERENCES]).score
    assert float(capsys.readouterr().out.partition("): ")[2]) == pytest.approx(expected, abs=0.005)


def test_the_mean_of_runs(files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    runs = ["--generated", files["shard0"], files["shard1"], "--generated", files["other"]]
    cli.main(["score", *runs, "--reference", files["first"]])
    values, _, mean = capsys.readouterr().out.partition("): ")[2].partition("   mean ")
    expected = [sacrebleu.corpus_bleu(texts, [REFERENCES]).score for texts in (TEXTS, [*TEXTS[:2], "It."])]
    assert [float(value) for value in values.split()] == pytest.approx(expected, abs=0.005)
    assert float(mean) == pytest.approx(statistics.mean(expected), abs=0.005)


@pytest.mark.parametrize("limit", [None, 20])
def test_rouge_is_that_of_rouge_score(files, capsys, limit) -> None:
    """For each sentence, rouge-score uses the better of two references."""
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rouge1", "rouge2", "rougeL"], True)
    options = [] if limit is None else ["--bytes", str(limit)]
    run = ["--generated", files["shard0"], files["shard1"]]
    cli.main(["score", "--rouge", *run, *options, "--reference", files["first"], files["second"]])
    found = dict(line.split(": ") for line in capsys.readouterr().out.splitlines())
    assert len(found) == 6
    for name in ("rouge1", "rouge2", "rougeL"):
        for part, field in (("recall", "recall"), ("F1", "fmeasure")):
            # The library chooses the reference by F1 for all figures.
            best = [
                max((scorer.score(each, text[:limit])[name] for each in pair), key=lambda score: score.fmeasure)
                for text, *pair in zip(TEXTS, REFERENCES, SECOND, strict=True)
            ]
            expected = 100 * statistics.mean(getattr(score, field) for score in best)
            assert float(found[f"{name} {part}"]) == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize(("limit", "recall"), [(7, 0), (8, 100)])
def test_rouge_counts_letters_and_not_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], limit: int, recall: float
) -> None:
    """The text has seven letters, which are eight bytes in UTF-8."""
    pytest.importorskip("rouge_score")
    text, reference = "\u00e9 x cat", tmp_path / "reference"
    reference.write_text("cat\n")
    run = ["--generated", generated(tmp_path / "run", [0], [text], [text])]
    cli.main(["score", "--rouge", "--bytes", str(limit), *run, "--reference", str(reference)])
    found = dict(line.split(": ") for line in capsys.readouterr().out.splitlines())
    assert float(found["rouge1 recall"]) == recall


def test_rouge_knows_the_latin_alphabet(tmp_path: Path) -> None:
    texts = ["\u044d\u0442\u043e \u0434\u043e\u043c", "\u0434\u0430"]
    (tmp_path / "reference").write_text("".join(line + "\n" for line in texts), encoding="utf-8")
    run = ["--generated", generated(tmp_path / "run", [0, 1], texts, texts)]
    with pytest.raises(SystemExit, match="--rouge"):
        cli.main(["score", "--rouge", *run, "--reference", str(tmp_path / "reference")])


def test_incompatible_files_and_options_are_refused(files: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="first has 3 "):
        cli.main(["score", "--generated", files["shard1"], "--reference", files["first"]])
    latin1 = tmp_path / "latin1"
    latin1.write_bytes(b"x\n\xdf\n")
    for generated, reference in ((latin1, files["first"]), (files["other"], latin1)):
        with pytest.raises(SystemExit, match="latin1, line 2"):
            cli.main(["score", "--generated", str(generated), "--reference", str(reference)])
    for words in (["--lowercase"], ["--tokenised", files["first"]]):
        with pytest.raises(SystemExit, match=words[0]):
            cli.main(["score", "--generated", files["other"], "--reference", files["first"], "--rouge", *words])
    with pytest.raises(SystemExit, match="--rouge"):
        cli.main(["score", "--generated", files["other"], "--reference", files["first"], files["second"]])
