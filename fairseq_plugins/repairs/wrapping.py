"""Tools for repairs: register a repair, replace a function of fairseq, and find the modules of a fairseq command."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

REPAIRS: list[Callable[[], None]] = []


def repair(function: Callable[[], None]) -> Callable[[], None]:
    """Register a function that applies a repair; `fairseq_plugins.install` calls all registered functions."""
    REPAIRS.append(functools.cache(function))  # a second call does nothing
    return function


def wrap(owner: Any, name: str) -> Callable[[FunctionT], FunctionT]:
    """Register a function that wraps ``owner.name``; the first argument of the function is the original function.

    Args:
        owner: a module or class, or the name of a command such as ``train``, whose loaded modules are repaired.
        name: the name of the wrapped function in ``owner``.
    """

    def register(function: FunctionT) -> FunctionT:
        @repair
        @functools.wraps(function)
        def apply() -> None:
            for each in programs(owner) if isinstance(owner, str) else [owner]:
                replace(each, name, function)

        return function

    return register


def replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Replace ``owner.name`` by a function whose first argument is the original function."""
    found = inspect.getattr_static(owner, name)
    kind = type(found) if isinstance(found, classmethod | staticmethod) else None
    original = found.__func__ if kind else found

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    setattr(owner, name, kind(wrapper) if kind else wrapper)


def programs(command: str) -> list[Any]:
    """Return the loaded modules of a fairseq command, which may run as a script or as a module."""
    modules = (sys.modules.get(name) for name in (f"fairseq_cli.{command}", "__main__"))
    place = ("fairseq_cli", f"{command}.py")
    return [each for each in modules if Path(getattr(each, "__file__", None) or "").parts[-2:] == place]


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace ``owner.name`` within the context, and restore the old value afterwards."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
