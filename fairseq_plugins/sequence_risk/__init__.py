"""Training for whole sentences: the expected cost of hypotheses (Edunov et al. 2018)."""

from fairseq_plugins.sequence_risk.criterion import SequenceRisk

__all__ = ["SequenceRisk"]
