"""An attribute that has another value for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give ``owner.name`` another value within the context; afterwards it has its own again, or none."""
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
