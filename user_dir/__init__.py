import fairseq_plugins  # noqa: F401  # importing it registers the models; this folder is what --user-dir points at
