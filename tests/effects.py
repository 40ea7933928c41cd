"""Print what importing each module changes: run as ``python -m tests.effects MODULE ...``.

This process imports fairseq and none of our modules, and each module is imported in a process forked from it.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import random
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

# Effects of these modules are not ours.
OTHERS = """fairseq_cli.generate fairseq_cli.hydra_train fairseq_cli.interactive fairseq_cli.preprocess
    fairseq_cli.train sacrebleu subword_nmt.apply_bpe subword_nmt.learn_bpe"""

WATCHED = {"argparse", "fairseq", "fairseq_cli", "hydra", "logging", "numpy", "omegaconf", "pickle", "torch"}
OPTIONAL = {"matplotlib", "onnx", "onnxruntime", "rouge_score"}


def is_watched(name: str) -> bool:
    return name.partition(".")[0] in WATCHED


def is_code(value: object) -> bool:
    return callable(value) or isinstance(value, property | staticmethod | classmethod)


def namespaces() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the modules of other packages, and their classes."""
    for name, module in list(sys.modules.items()):
        if is_watched(name):
            yield name, vars(module)
            for key, value in list(vars(module).items()):
                if isinstance(value, type) and is_watched(value.__module__):
                    yield f"{name}.{key}", vars(value)


def settings() -> dict[str, object]:
    found: dict[str, object] = {
        "environment": dict(os.environ),
        "signals": [signal.getsignal(number) for number in signal.valid_signals()],
        "hooks": (sys.excepthook, sys.displayhook, threading.excepthook),
        "filters of warnings": [*warnings.filters, warnings.showwarning],
        "path": list(sys.path),
        "limit of recursion": sys.getrecursionlimit(),
        "level of logging": (logging.root.manager.disable, logging.getLoggerClass()),
        "random numbers": repr((random.getstate(), np.random.get_state(), torch.get_rng_state().tolist())),  # noqa: NPY002
        "settings of numpy": (np.geterr(), np.get_printoptions()),
        "settings of torch": (
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.mkldnn.enabled,
            torch.backends.cudnn.enabled,
        ),
    }
    for name, logger in [("root", logging.root), *logging.root.manager.loggerDict.items()]:
        if isinstance(logger, logging.Logger) and (name == "root" or is_watched(name)):
            found[f"logger {name}"] = logger.level, logger.propagate, [*logger.handlers], [*logger.filters]
    return found


class Before:
    """The state of this process: the code of other packages by identity, and settings by value."""

    def __init__(self) -> None:
        self.namespaces = [(name, space, dict(space)) for name, space in namespaces()]
        self.settings = settings()

    def changes(self) -> list[str]:
        """Return the names of everything that has changed since."""
        changed = []
        for name, space, before in self.namespaces:
            for key, value in list(space.items()):
                old = before.get(key)
                if value is not old and (is_code(value) or is_code(old)) and not self.is_loaded(name, key):
                    changed.append(f"{name}.{key}")
            changed += [f"{name}.{key}" for key, value in before.items() if is_code(value) and key not in space]
        now = settings()
        new_logger = logging.NOTSET, True, [], []
        return changed + [name for name, value in now.items() if value != self.settings.get(name, new_logger)]

    @staticmethod
    def is_loaded(name: str, key: str) -> bool:
        """Return whether the change is only that a lazily loaded submodule was loaded."""
        return f"{name}.{key}" in sys.modules


def effects_of(module: str, before: Before) -> list[str]:
    """Return what importing a module changes in this process."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in OPTIONAL:
            return [f"{type(error).__name__}: {error}"]
    return before.changes()


def main(modules: list[str]) -> None:
    warnings.simplefilter("ignore")
    for name in OTHERS.split():
        importlib.import_module(name)
    before = Before()
    for module in modules:
        child = os.fork()
        if not child:
            try:
                before.settings = settings()  # importing has reseeded Python's random numbers
                print(json.dumps([module, effects_of(module, before)]), flush=True)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            print(json.dumps([module, ["it cannot be imported alone"]]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
