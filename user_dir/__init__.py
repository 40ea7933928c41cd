import fairseq_plugins.registration  # noqa: F401  # this folder is what --user-dir points at
