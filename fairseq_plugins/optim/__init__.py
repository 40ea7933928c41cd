"""Learning-rate schedules and optimizers; importing this registers them."""

from fairseq_plugins.optim import anneal_after_plateau, simplex_adam, weighted_inverse_sqrt  # noqa: F401  (registration)
