"""The folder to pass as ``--user-dir`` to fairseq's commands."""

import fairseq_plugins

fairseq_plugins.install(command=True)
