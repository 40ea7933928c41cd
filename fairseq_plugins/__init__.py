"""Translation models for fairseq: importing this registers them, which is what ``--user-dir`` does."""

from fairseq_plugins import models, optim  # noqa: F401  (registration)

__version__ = "0.1.0"
