"""Losses; importing this registers them."""

from fairseq_plugins.criterions import (  # noqa: F401  (registration)
    sequence_risk,
    vocab_selection_cross_entropy,
    weighted_label_smoothed_cross_entropy,
)
