"""A Convolutional Encoder Model for Neural Machine Translation (Gehring et al. 2016, arXiv 1611.02344)."""

from fairseq_plugins.common import anneal_after_plateau  # noqa: F401  (registers the schedule of the recipes)
from fairseq_plugins.conv_encoder.model import ConvEncoderModel

__all__ = ["ConvEncoderModel"]
