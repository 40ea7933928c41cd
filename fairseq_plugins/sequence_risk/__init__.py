"""Training that minimises the expected cost of hypotheses, such as 1 - BLEU (Edunov et al. 2018)."""

from fairseq_plugins.sequence_risk.criterion import SequenceRisk

__all__ = ["SequenceRisk"]
