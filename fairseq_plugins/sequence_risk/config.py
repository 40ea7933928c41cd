"""Options of the criterion `sequence_risk`."""

from dataclasses import dataclass, field

from fairseq.dataclass import ChoiceEnum, FairseqDataclass

from fairseq_plugins.common.options import FRACTION, POSITIVE, SIZE
from fairseq_plugins.sequence_risk.costs import SENTENCE_SCORES


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
