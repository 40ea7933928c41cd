"""Convolutional Sequence to Sequence Learning (Gehring et al. 2017, arXiv 1705.03122)."""

from fairseq_plugins.common import anneal_after_plateau  # noqa: F401  (registers the schedule of the recipes)
from fairseq_plugins.convs2s.model import ConvS2SModel

__all__ = ["ConvS2SModel"]
