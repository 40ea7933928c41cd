"""Options of the criterion `sequence_risk`, and the sentence scores of ``--risk-cost``, from 0 to 1."""

from argparse import SUPPRESS
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Optional

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from sacrebleu import BLEU, CHRF

from fairseq_plugins.common.options import FRACTION, POSITIVE, SIZE
from fairseq_plugins.common.rouge import rouge_scorer

# Takes a reference, and returns a function that scores hypotheses; both are strings of words.
SentenceScore = Callable[[str], Callable[[str], float]]


def _sacrebleu(metric: Callable[..., BLEU | CHRF], reference: str) -> Callable[[str], float]:
    """Return the sentence score of sacreBLEU, which counts the n-grams of the reference only once."""
    scorer = metric(references=[[reference]])
    return lambda hypothesis: float(scorer.corpus_score([hypothesis], None).score) / 100


def _rouge(name: str) -> SentenceScore:
    """Return the F1 of rouge-score with stemming, like `fairseq-plugins score`.

    Raises:
        ValueError: rouge-score is not installed.
    """
    scorer = rouge_scorer([name])
    return lambda reference: lambda hypothesis: float(scorer.score(reference, hypothesis)[name].fmeasure)


# Constructors of the scores, called once per training, because rouge-score logs a line for each scorer.
SENTENCE_SCORES: dict[str, Callable[[], SentenceScore]] = {
    # BLEU without further tokenisation; add-one smoothing for bigrams and longer n-grams (Lin & Och 2004).
    "bleu": lambda: partial(
        _sacrebleu, partial(BLEU, tokenize="none", smooth_method="add-k", smooth_value=1, force=True)
    ),
    "chrf": lambda: partial(_sacrebleu, CHRF),
    **{name: partial(_rouge, name) for name in ("rouge1", "rouge2", "rougeL")},
}


@dataclass
class SequenceRiskConfig(FairseqDataclass):
    risk_hypotheses: int = field(
        default=8, metadata={"help": "number of hypotheses per sentence (beam width)", "range": SIZE}
    )
    # The former name of risk_hypotheses, used by old command lines, configuration files and checkpoints.
    risk_candidates: Optional[int] = field(default=None, metadata={"help": SUPPRESS, "range": SIZE})
    risk_sampling: bool = field(
        default=False, metadata={"help": "in training, sample hypotheses from the model instead of beam search"}
    )
    risk_reference: bool = field(default=False, metadata={"help": "add the reference to the hypotheses"})
    risk_cost: ChoiceEnum(list(SENTENCE_SCORES)) = field(  # type: ignore[valid-type]
        default="bleu",
        metadata={"help": "cost of a hypothesis: 1 minus this score of its words, without BPE, against the reference"},
    )
    risk_scale: float = field(
        default=1.0,
        metadata={
            "help": "factor of the mean log-probabilities in the softmax over the hypotheses",
            "range": POSITIVE,
        },
    )
    risk_alpha: float = field(
        default=0.3,
        metadata={
            "help": "weight of the label-smoothed cross-entropy per word; 1 minus this is the weight of the risk",
            "range": FRACTION,
        },
    )
    label_smoothing: float = field(
        default=0.0, metadata={"help": "epsilon for label smoothing, 0 means no label smoothing", "range": FRACTION}
    )
