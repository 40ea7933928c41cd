"""A Convolutional Encoder Model for NMT (Gehring et al. 2016): importing it registers the architectures."""

from fairseq_plugins.models.conv_encoder import model, presets  # noqa: F401  (registration)
