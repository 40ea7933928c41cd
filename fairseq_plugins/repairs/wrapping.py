"""How a repair takes the place of what it mends."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def in_place_of(owner: Any, name: str) -> Callable[[FunctionT], FunctionT]:
    """A decorator: the function takes the place of ``owner.name``, which it wraps."""

    def put(function: FunctionT) -> FunctionT:
        setattr(owner, name, functools.wraps(getattr(owner, name))(function))
        return function

    return put


@contextlib.contextmanager
def silently(level: int = logging.INFO) -> Iterator[None]:
    """For probes: drop log records up to this level."""
    before = logging.root.manager.disable
    logging.disable(level)
    try:
        yield
    finally:
        logging.disable(before)


def raises(error: type[Exception], call: Callable[..., Any], *args: Any) -> bool:
    """For probes: whether the call fails so."""
    try:
        call(*args)
    except error:
        return True
    return False
