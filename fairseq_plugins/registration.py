"""Importing this mends fairseq and registers models, losses, optimizers, schedules and task; ``--user-dir`` does so.

So does a model's ``from_pretrained``, for a checkpoint may name any of them.
"""

from fairseq_plugins import (  # noqa: F401  (compat mends fairseq, the others register)
    compat,
    criterions,
    generation,
    models,
    optim,
)
from fairseq_plugins.backends import cpu  # noqa: F401  (hangs itself in the models)
