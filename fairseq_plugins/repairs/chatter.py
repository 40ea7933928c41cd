"""Messages that users of fairseq's commands can do nothing about."""

from __future__ import annotations

import logging
import sys
import warnings

from omegaconf import DictConfig

# How the warnings begin: hydra's, of the ways in which fairseq uses it, and torch's.
WARNINGS = (
    r"hydra\.experimental\.\w+\(\) is no longer experimental",
    r"\s*The version_base parameter is not specified",
    r"In 'config': Usage of deprecated keyword in package header",
    r"\s*'config' is validated against ConfigStore schema",
    r"\s*The strict flag in the compose API is deprecated",
    r"'pin_memory' argument is set as true but no accelerator is found",
)


def hide_chatter() -> None:
    """Hide warnings of outdated calls, and what ``fairseq-interactive`` logs between a user's lines.

    It logs four lines about batches for every line that is typed, and at its start its whole configuration, which takes
    many screens.  There is nothing to probe.
    """
    for message in WARNINGS:
        warnings.filterwarnings("ignore", message)
    logging.getLogger("hydra.core.utils").setLevel(logging.INFO)
    if any(hasattr(sys.modules.get(name), "buffered_read") for name in ("fairseq_cli.interactive", "__main__")):
        logging.getLogger("fairseq.tasks.fairseq_task").setLevel(logging.WARNING)
        logging.getLogger("fairseq_cli.interactive").addFilter(lambda record: not isinstance(record.msg, DictConfig))
