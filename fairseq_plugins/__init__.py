"""Translation models for fairseq: importing this registers them, which is what ``--user-dir`` does."""

from fairseq_plugins import (  # noqa: F401  (compat mends fairseq, the others register)
    compat,
    criterions,
    generation,
    models,
    optim,
)

__version__ = "0.1.0"
