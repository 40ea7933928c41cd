"""Convolutional Sequence to Sequence Learning (Gehring et al. 2017): importing it registers the architectures."""

from fairseq_plugins.models.convs2s import model, presets  # noqa: F401  (registration)
