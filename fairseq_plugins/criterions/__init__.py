"""Losses; importing this registers them."""

from fairseq_plugins.criterions import weighted_label_smoothed_cross_entropy  # noqa: F401  (registration)
