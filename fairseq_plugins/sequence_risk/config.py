"""Options of the criterion `sequence_risk`, and the scores for ``--risk-cost``, which are between 0 and 1."""

from argparse import SUPPRESS
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Optional

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from sacrebleu import BLEU, CHRF

from fairseq_plugins.common.options import FRACTION, POSITIVE, SIZE, option
from fairseq_plugins.common.text import rouge_scorer

# A function that returns, for a reference, a function that scores a hypothesis.
# The reference and the hypothesis are strings of words.
SentenceScore = Callable[[str], Callable[[str], float]]


def _sacrebleu(metric: Callable[..., BLEU | CHRF], reference: str) -> Callable[[str], float]:
    """Return a function that scores hypotheses against ``reference`` with sacreBLEU.

    The n-grams of the reference are counted once for all hypotheses.
    """
    scorer = metric(references=[[reference]])
    return lambda hypothesis: float(scorer.corpus_score([hypothesis], None).score) / 100


def _rouge(name: str) -> SentenceScore:
    """Return a `SentenceScore` for ROUGE F1 with stemming, like `fairseq-plugins score`."""
    scorer = rouge_scorer([name])
    return lambda reference: lambda hypothesis: float(scorer.score(reference, hypothesis)[name].fmeasure)


# Constructors of the scores.  A training constructs its score only once, because rouge-score logs a line whenever a
# scorer is constructed.
SENTENCE_SCORES: dict[str, Callable[[], SentenceScore]] = {
    # BLEU without tokenisation, and with add-one smoothing for bigrams and longer n-grams (Lin & Och 2004).
    "bleu": lambda: partial(
        _sacrebleu, partial(BLEU, tokenize="none", smooth_method="add-k", smooth_value=1, force=True)
    ),
    "chrf": lambda: partial(_sacrebleu, CHRF),
    **{name: partial(_rouge, name) for name in ("rouge1", "rouge2", "rougeL")},
}


@dataclass
class SequenceRiskConfig(FairseqDataclass):
    risk_hypotheses: int = option(8, "number of hypotheses per sentence (beam width)", SIZE)
    # The former name of risk_hypotheses, which old command lines, configuration files and checkpoints contain.
    risk_candidates: Optional[int] = option(None, SUPPRESS, SIZE)
    risk_sampling: bool = option(False, "in training, generate hypotheses by sampling, not by beam search")
    risk_reference: bool = option(False, "add the reference to the hypotheses")
    risk_cost: ChoiceEnum(list(SENTENCE_SCORES)) = option(  # type: ignore[valid-type]
        "bleu", "cost of a hypothesis: 1 minus this score of its words, without BPE, against the reference"
    )
    risk_scale: float = option(1.0, "factor of the mean log-probabilities in the softmax over the hypotheses", POSITIVE)
    risk_alpha: float = option(
        0.3, "weight of the label-smoothed cross-entropy per word; the risk has the weight 1 minus this value", FRACTION
    )
    label_smoothing: float = option(0.0, "epsilon for label smoothing, 0 means no label smoothing", FRACTION)
