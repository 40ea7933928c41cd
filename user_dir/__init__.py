"""fairseq's commands import this folder with ``--user-dir``."""

import fairseq_plugins

fairseq_plugins.install(command=True)
