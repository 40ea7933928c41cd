"""The model families; importing this registers them."""

from fairseq_plugins.models import conv_encoder, convs2s, weighted_transformer  # noqa: F401  (registration)
