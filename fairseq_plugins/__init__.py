"""Translation models for fairseq: importing this registers them, which is what ``--user-dir`` does."""

from fairseq_plugins import compat, criterions, models, optim  # noqa: F401  (compat mends fairseq, the others register)

__version__ = "0.1.0"
