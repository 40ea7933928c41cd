"""Costs of hypotheses, and scores of single sentences compared with sacreBLEU's and rouge-score's."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest
import torch
from fairseq.data import Dictionary
from sacrebleu import BLEU, CHRF

from fairseq_plugins.sequence_risk.config import SENTENCE_SCORES
from tests.sequence_risk.conftest import EOS, PAD, criterion

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


def test_costs_use_words_without_bpe() -> None:
    texts = {}
    for name, words in (("@@", ["un@@", "known"]), ("\u2581", ["\u2581un", "known"]), ("", ["un", "known"])):
        dictionary = Dictionary()
        tokens = [dictionary.add_symbol(word) for word in words]
        found = criterion(dictionary)
        texts[name] = found.text([*tokens, dictionary.unk(), EOS], "no").replace("\u2581", " ")
    assert texts["@@"].split() == ["unknown", "no"]
    assert texts[""].split() == ["un", "known", "no"]
    assert texts["\u2581"].startswith("unknown")


@pytest.mark.parametrize("cost", ["bleu", "chrf", "rouge1", "rouge2", "rougeL"])
def test_unknown_words_are_never_right(sample: Any, cost: str) -> None:
    """An unknown word costs as much as a wrong word, even if the reference has an unknown word, too."""
    pytest.importorskip("rouge_score")
    dictionary = Dictionary()
    for letter in "abcdefghijk":
        dictionary.add_symbol(letter * 4)
    found, unk = criterion(dictionary, risk_cost=cost, risk_reference=True), dictionary.unk()
    wrong = dictionary.add_symbol("xxxxxxxx")
    target = torch.tensor([[10, unk, 11, 12, unk, EOS], [unk, unk, EOS, PAD, PAD, PAD], [unk, EOS, PAD, PAD, PAD, PAD]])
    rows = [[10, unk, 11, 12, unk, EOS], [10, wrong, 11, 12, wrong, EOS]], [[unk, unk, EOS]], [[unk, EOS], [EOS]]
    _, sets = found.hypothesis_sets({**sample, "target": target}, list(rows))
    assert sets[0].costs[0] == sets[0].costs[1] > 0.3
    assert sets[0].best == sets[0].costs[0]
    assert [*sets[1].costs, *sets[2].costs] == [1, 1, 1]


def test_an_empty_hypothesis_matches_an_empty_reference(sample: Any, dictionary: Dictionary) -> None:
    target = torch.tensor([[EOS, PAD], [EOS, PAD], [10, EOS]])
    _, sets = criterion(dictionary).hypothesis_sets({**sample, "target": target}, [[[EOS]], [[10, EOS]], [[EOS]]])
    assert [each.costs for each in sets] == [[0], [1], [1]]


def test_the_first_word_may_follow_padding(sample: Any, dictionary: Dictionary) -> None:
    """With --left-pad-target, rows are padded on the left."""
    sample["net_input"]["prev_output_tokens"] = torch.tensor([[PAD, EOS, 10], [EOS, 10, 11], [PAD, PAD, EOS]])
    rows, _ = criterion(dictionary).hypothesis_sets(sample, [[[EOS]]] * 3)
    assert rows.first == [EOS] * 3


@pytest.mark.parametrize("spaces", [False, True])
def test_bleu_needs_words_separated_by_spaces(sample: Any, spaces: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The warning is printed only once."""
    dictionary = Dictionary()
    first, more = (dictionary.add_symbol(word) for word in ("\u2581a", "\u2581b" if spaces else "b"))
    found = criterion(dictionary)
    found.hypothesis_sets(
        {**sample, "target": torch.tensor([[first, EOS]] * 3)}, [[[EOS]]] * 3
    )  # too short for a warning
    for _ in range(2):
        found.hypothesis_sets({**sample, "target": torch.tensor([[first, *[more] * 6, EOS]] * 3)}, [[[EOS]]] * 3)
    assert caplog.text.count("--risk-cost bleu ") == (not spaces)


def test_rouge_needs_the_latin_alphabet() -> None:
    pytest.importorskip("rouge_score")
    dictionary = Dictionary()
    for word in ("\u044d\u0442\u043e", "\u0434\u043e\u043c"):
        dictionary.add_symbol(word)
    with pytest.raises(ValueError, match="--risk-cost rouge1"):
        criterion(dictionary, risk_cost="rouge1")
    criterion(dictionary, risk_cost="chrf")
    dictionary.add_symbol("Haus")
    criterion(dictionary, risk_cost="rouge1")
