"""The folder for ``--user-dir`` of fairseq's commands."""

import fairseq_plugins

fairseq_plugins.install(command=True)
