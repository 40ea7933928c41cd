"""Learning-rate schedules and optimizers; importing this registers them."""

from fairseq_plugins.optim import anneal_after_plateau  # noqa: F401  (registration)
