"""Helpers of the repairs: wrap a function, probe for a fault, find the module of a running command."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def wrap(owner: Any, name: str) -> Callable[[FunctionT], FunctionT]:
    """Return a decorator that replaces ``owner.name`` by a function that wraps it."""

    def replace(function: FunctionT) -> FunctionT:
        setattr(owner, name, functools.wraps(getattr(owner, name))(function))
        return function

    return replace


def programs(command: str, function: str) -> list[Any]:
    """Return the loaded modules of a fairseq command, which may run as a script or as a module.

    Args:
        command: name of the command without ``fairseq-``.
        function: a function that only this command's module has.
    """
    modules = (sys.modules.get(name) for name in (f"fairseq_cli.{command}", "__main__"))
    return [module for module in modules if hasattr(module, function)]


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace ``owner.name`` within the context, and restore it afterwards."""
    own = vars(owner)
    before = {name: own[name]} if name in own else {}
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before:
            setattr(owner, name, before[name])
        else:
            delattr(owner, name)


def mentions(function: Any, name: str) -> bool:
    """Return whether the code of a function contains a name or a string, for probes that cannot call the function."""
    code = getattr(function, "__func__", function).__code__
    return name in code.co_names or name in code.co_consts
