"""How good a translation of one sentence is, from 0 to 1, by the measures that whole test parts are judged by."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import partial

from sacrebleu import CHRF

from fairseq_plugins.rouge import rouge_scorer

__all__ = ["SENTENCE_SCORES", "SentenceScore", "sentence_bleu"]

# Of a reference, as a string of words, what scores a hypothesis beside it.
SentenceScore = Callable[[str], Callable[[str], float]]

_ORDERS = range(1, 5)


def sentence_bleu(reference: str) -> Callable[[str], float]:
    """BLEU of words as they are; n-grams above one are smoothed by adding one to each count (Lin & Och 2004).

    It is sacreBLEU's with ``smooth_method="add-k"``, in a fraction of its time.
    """
    words = reference.split()
    wanted = [_ngrams(words, n) for n in _ORDERS]

    def score(hypothesis: str) -> float:
        found = hypothesis.split()
        total = 0.0
        for n, counts in zip(_ORDERS, wanted, strict=True):
            ngrams = _ngrams(found, n)
            right = sum(min(count, counts[ngram]) for ngram, count in ngrams.items() if ngram in counts)
            smoothing = n > 1
            if not right + smoothing:
                return 0.0
            total += math.log((right + smoothing) / (max(len(found) - n + 1, 0) + smoothing))
        return math.exp(min(0.0, 1 - len(words) / len(found)) + total / len(_ORDERS))

    return score


def _ngrams(words: list[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(zip(*(words[start:] for start in range(n)), strict=False))


def _chrf() -> SentenceScore:
    """sacreBLEU's."""
    metric = CHRF()
    return lambda reference: lambda hypothesis: float(metric.sentence_score(hypothesis, [reference]).score) / 100


def _rouge(name: str) -> SentenceScore:
    """F1, with stemming, as of `fairseq-plugins score`.

    Raises:
        ValueError: rouge-score is not installed.
    """
    scorer = rouge_scorer([name])
    return lambda reference: lambda hypothesis: float(scorer.score(reference, hypothesis)[name].fmeasure)


# What makes each of them, once for a training: rouge-score logs a line whenever it is set up.
SENTENCE_SCORES: dict[str, Callable[[], SentenceScore]] = {
    "bleu": lambda: sentence_bleu,
    "chrf": _chrf,
    **{name: partial(_rouge, name) for name in ("rouge1", "rouge2", "rougeL")},
}
