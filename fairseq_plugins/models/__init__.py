"""The model families; importing this registers them."""

from fairseq_plugins.models import convs2s, weighted_transformer  # noqa: F401  (registration)
