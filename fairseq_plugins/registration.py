"""Importing this mends fairseq and registers models, losses, optimizers, schedules and task; ``--user-dir`` does so."""

from fairseq_plugins import compat, conv_encoder, convs2s, criterions, generation, weighted_transformer  # noqa: F401
