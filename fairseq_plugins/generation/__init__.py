"""Generation; importing this registers its task."""

from fairseq_plugins.generation import task  # noqa: F401  (registration)
