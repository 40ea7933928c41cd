"""What ``fairseq-plugins user-dir`` prints, wherever the package is installed: importing this registers everything.

``fairseq_plugins`` itself would do in a fresh process only: fairseq passes over a folder that has been imported before.
"""

import fairseq_plugins.command  # noqa: F401
