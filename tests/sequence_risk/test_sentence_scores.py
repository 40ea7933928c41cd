"""Scores of single sentences, compared with sacreBLEU's and rouge-score's."""

from __future__ import annotations

import random
import sys

import pytest
from sacrebleu import BLEU, CHRF

from fairseq_plugins.sequence_risk.config import SENTENCE_SCORES

PAIRS = [
    ("a dog runs", "a dog runs"),
    ("the the the the", "the dog"),
    ("a dog runs in the grass", "a dog is running in the green grass"),
    ("a", "a dog"),
    ("dog", "a"),
    ("", "a dog"),
    ("a dog", ""),
]


def random_pairs() -> list[tuple[str, str]]:
    generator = random.Random(1)

    def sentence() -> str:
        return " ".join(generator.choices("abcd", k=generator.randint(1, 12)))

    return [(sentence(), sentence()) for _ in range(300)]


@pytest.mark.parametrize(("hypothesis", "reference"), [*PAIRS, *random_pairs()])
def test_bleu(hypothesis: str, reference: str) -> None:
    metric = BLEU(smooth_method="add-k", smooth_value=1, tokenize="none")
    expected = metric.corpus_score([hypothesis], [[reference]]).score / 100
    assert SENTENCE_SCORES["bleu"]()(reference)(hypothesis) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("hypothesis", "reference"), PAIRS)
def test_others(hypothesis: str, reference: str) -> None:
    rouge = pytest.importorskip("rouge_score.rouge_scorer")
    scored = rouge.RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True).score(reference, hypothesis)
    for name in ("rouge1", "rouge2", "rougeL"):
        assert SENTENCE_SCORES[name]()(reference)(hypothesis) == scored[name].fmeasure
    chrf = CHRF().corpus_score([hypothesis], [[reference]]).score / 100
    assert SENTENCE_SCORES["chrf"]()(reference)(hypothesis) == pytest.approx(chrf)


def test_without_rouge_score(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)  # makes the import fail
    with pytest.raises(ValueError, match="rouge-score"):
        SENTENCE_SCORES["rouge1"]()
