"""Weighted Transformer Network for Machine Translation (Ahmed et al. 2017, arXiv 1711.02132)."""

from fairseq_plugins.weighted_transformer import training  # noqa: F401  (registration)
from fairseq_plugins.weighted_transformer.model import WeightedTransformerModel

__all__ = ["WeightedTransformerModel"]
