"""Repairs of fairseq, torch and numpy; no other package of this plugin patches these libraries.

Importing a module of this package registers its repairs, and `repair_fairseq` applies all registered repairs.  A
repair is a decorated function: the decorator is ``@wrap`` if the function wraps another function, and ``@repair``
otherwise.  No two repairs wrap the same function, so the order of the repairs does not matter.  No repair tests whether
the installed fairseq has the bug, because `setup.py` requires exact versions of fairseq.  In a version without the bug,
a repair changes nothing.

A few functions here repair no fault: they make fairseq faster (``update_in_one_pass``, ``smooth_in_one_pass``) or less
verbose.  They are in this package because they, too, replace functions of fairseq.

`fairseq_plugins.repairs.refusals` contains the table of refused options.
"""

from fairseq_plugins.repairs import (  # noqa: F401  (imported to register their repairs)
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
    """Set up a process that runs one fairseq command and nothing else."""
    command.hide_chatter()
    command.keep_freed_memory()
    command.limit_cached_products()
    command.print_option_errors_without_traceback()
