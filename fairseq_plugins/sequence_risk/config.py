"""Options of the criterion `sequence_risk`, and the scores of a translation that ``--risk-cost`` chooses from.

A score says how good a translation of one sentence is, from 0 to 1, by a measure that whole test parts are judged by.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from sacrebleu import BLEU, CHRF

from fairseq_plugins.common.options import FRACTION, POSITIVE, SIZE
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


# Functions that make the scores, called once for a training: rouge-score logs a line whenever it is set up.
SENTENCE_SCORES: dict[str, Callable[[], SentenceScore]] = {
    # Of words as they are; n-grams above one are smoothed by adding one to each count (Lin & Och 2004).
    "bleu": lambda: partial(
        _sacrebleu, partial(BLEU, tokenize="none", smooth_method="add-k", smooth_value=1, force=True)
    ),
    "chrf": lambda: partial(_sacrebleu, CHRF),
    **{name: partial(_rouge, name) for name in ("rouge1", "rouge2", "rougeL")},
}


@dataclass
class SequenceRiskConfig(FairseqDataclass):
    risk_candidates: int = field(
        default=8,
        metadata={
            "help": "translations of each sentence that the risk is expected over (the width of a beam)",
            "range": SIZE,
        },
    )
    risk_sampling: bool = field(
        default=False, metadata={"help": "draw them from the model's distribution instead of searching the best"}
    )
    risk_reference: bool = field(default=False, metadata={"help": "the reference is one more of them"})
    risk_cost: ChoiceEnum(list(SENTENCE_SCORES)) = field(  # type: ignore[valid-type]
        default="bleu",
        metadata={"help": "a translation costs 1 minus this score of its words, without BPE, beside the reference"},
    )
    risk_scale: float = field(
        default=1.0,
        metadata={
            "help": "factor of a translation's mean log-probability in the softmax over the translations",
            "range": POSITIVE,
        },
    )
    risk_alpha: float = field(
        default=0.3,
        metadata={
            "help": "weight of the label-smoothed cross-entropy of a word; the risk has the rest",
            "range": FRACTION,
        },
    )
    label_smoothing: float = field(
        default=0.0, metadata={"help": "epsilon for label smoothing, 0 means no label smoothing", "range": FRACTION}
    )
