import fairseq_plugins.command  # noqa: F401  # this folder is what --user-dir points at
