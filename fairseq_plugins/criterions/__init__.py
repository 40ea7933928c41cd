"""Losses; importing this registers them."""

from fairseq_plugins.criterions import sequence_risk, vocab_selection_cross_entropy  # noqa: F401  (registration)
