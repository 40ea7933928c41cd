"""Repairs of fairseq, torch and numpy; no other package patches them.

Importing a module of this package registers its repairs, and `repair_fairseq` applies them.  A repair is a function
with the decorator `wrap`, or `repair` if it does not wrap a function.  No two repairs wrap the same function, so their
order does not matter.  A repair does not test whether fairseq has its fault, because the versions of fairseq are fixed
in `setup.py`; without the fault, it changes nothing.

`fairseq_plugins.repairs.refusals` is the table of refused options.
"""

from fairseq_plugins.repairs import (  # noqa: F401  (their repairs are registered)
    checkpoints,
    command,
    epochs,
    hub,
    resuming,
    safety,
    saving,
    texts,
    training,
    translating,
)
from fairseq_plugins.repairs.wrapping import REPAIRS


def repair_fairseq() -> None:
    """Apply the repairs that are not yet applied."""
    for repair in REPAIRS:
        repair()


def set_up_command() -> None:
    """Set up a process that does nothing but run one fairseq command."""
    command.hide_chatter()
    command.keep_freed_memory()
    command.limit_cached_products()
    command.print_option_errors_without_traceback()
