"""Weighted Transformer Network for MT (Ahmed et al. 2017): importing it registers the architectures."""

from fairseq_plugins.models.weighted_transformer import model, presets  # noqa: F401  (registration)
