"""Translation models for fairseq.  `install` registers the models and repairs bugs of fairseq."""

from __future__ import annotations

import functools
import importlib
import pkgutil

__version__ = "0.2.0"


def install(command: bool = False) -> None:
    """Repair fairseq, and register the plugin's models, criterions, optimizers, schedules and task.

    This function is called by fairseq's ``--user-dir``, by ``from_pretrained`` of this plugin's models, and by the
    commands of ``fairseq-plugins``.  A repeated call does nothing, but ``install(command=True)`` after ``install()``
    adds the setup of a command.

    Args:
        command: whether to also set up the process for a fairseq command.  The setup changes memory settings, hides
            tracebacks of option errors, and hides warnings that users cannot act on.
    """
    _install(command)


@functools.cache
def _install(command: bool) -> None:
    repairs = importlib.import_module("fairseq_plugins.repairs")
    repairs.repair_fairseq()
    for package in pkgutil.iter_modules(__path__):
        if package.ispkg:
            importlib.import_module(f"{__name__}.{package.name}")
    if command:
        repairs.set_up_command()
