"""Import `registration`, keep memory, and print errors of options without a traceback: for fairseq's commands, whose
``--user-dir`` imports this.
"""

import fairseq_plugins.registration  # noqa: F401
from fairseq_plugins.compat.errors import print_errors_of_options_alone
from fairseq_plugins.compat.memory import keep_memory

keep_memory()
print_errors_of_options_alone()
