"""Code that all model families share: base classes, layers, decode-time state, a schedule, options and files."""

from fairseq_plugins.common import anneal_after_plateau  # noqa: F401  (registration)
