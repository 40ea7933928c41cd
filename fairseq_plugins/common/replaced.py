"""Temporary replacement of an attribute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
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
