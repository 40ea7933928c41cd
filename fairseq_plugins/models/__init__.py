"""The model families; importing this registers them."""

from fairseq_plugins.models import convs2s  # noqa: F401  (registration)
