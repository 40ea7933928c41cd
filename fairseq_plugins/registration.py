"""Importing this mends fairseq and registers models, losses, optimizers, schedules and task; ``--user-dir`` does so.

So does importing any of these but compat, for a checkpoint may name the others.
"""

from fairseq_plugins import (  # noqa: F401  (compat mends fairseq, the others register)
    compat,
    criterions,
    generation,
    models,
    optim,
)
from fairseq_plugins.backends import cpu
from fairseq_plugins.models.translation_model import TranslationModel

TranslationModel.accelerate_ = staticmethod(cpu.accelerate_)
