"""Translation models for fairseq.  Importing registers names with fairseq, and repairs nothing; see `install`."""

from __future__ import annotations

import functools
import importlib
import logging
import pkgutil

__version__ = "0.2.0"

# These rooms register no names with fairseq.
_UNREGISTERED = {"cli", "export", "repairs"}

# fairseq's text_to_speech asks for tensorboardX when fairseq is imported, by whomever.
logging.getLogger("fairseq.tasks.text_to_speech").addFilter(lambda record: "tensorboardX" not in record.getMessage())


def install(command: bool = False) -> None:
    """Repair fairseq, and register all models, criterions, optimizers, schedules and the task.

    ``--user-dir`` calls this, and so do ``from_pretrained`` of our models and the commands of ``fairseq-plugins``.
    Later calls do nothing.

    Args:
        command: also set up a process of one of fairseq's commands: memory, and errors of options without a traceback,
            and no warnings that its users can do nothing about.
    """
    _repair_and_register()
    if command:
        _set_up_command()


@functools.cache
def _set_up_command() -> None:
    importlib.import_module("fairseq_plugins.repairs").set_up_command()


@functools.cache
def _repair_and_register() -> None:
    importlib.import_module("fairseq_plugins.repairs").repair_fairseq()
    for room in pkgutil.iter_modules(__path__):
        if room.ispkg and room.name not in _UNREGISTERED:
            importlib.import_module(f"{__name__}.{room.name}")
