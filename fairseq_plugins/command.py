"""What fairseq's commands import of this plugin, by ``--user-dir``: `registration`, and memory that is kept."""

import fairseq_plugins.registration  # noqa: F401
from fairseq_plugins.compat.memory import keep_memory

keep_memory()
