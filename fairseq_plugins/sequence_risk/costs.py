"""How good a translation of one sentence is, from 0 to 1, by the measures that whole test parts are judged by."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from sacrebleu import BLEU, CHRF

from fairseq_plugins.common.rouge import rouge_scorer

# Of a reference, as a string of words, what scores a hypothesis beside it.
SentenceScore = Callable[[str], Callable[[str], float]]


def _sacrebleu(metric: Callable[..., BLEU | CHRF], reference: str) -> Callable[[str], float]:
    """sacreBLEU's, which of a reference that it is given counts the n-grams once."""
    scorer = metric(references=[[reference]])
    return lambda hypothesis: float(scorer.corpus_score([hypothesis], None).score) / 100


def _rouge(name: str) -> SentenceScore:
    """F1, with stemming, as of `fairseq-plugins score`.

    Raises:
        ValueError: rouge-score is not installed.
    """
    scorer = rouge_scorer([name])
    return lambda reference: lambda hypothesis: float(scorer.score(reference, hypothesis)[name].fmeasure)


# What makes each of them, once for a training: rouge-score logs a line whenever it is set up.
SENTENCE_SCORES: dict[str, Callable[[], SentenceScore]] = {
    # Of words as they are; n-grams above one are smoothed by adding one to each count (Lin & Och 2004).
    "bleu": lambda: partial(
        _sacrebleu, partial(BLEU, tokenize="none", smooth_method="add-k", smooth_value=1, force=True)
    ),
    "chrf": lambda: partial(_sacrebleu, CHRF),
    **{name: partial(_rouge, name) for name in ("rouge1", "rouge2", "rougeL")},
}
