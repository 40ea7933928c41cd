"""What arguments of several commands are."""

from __future__ import annotations

from argparse import ArgumentTypeError

__all__ = ["positive"]


def positive(text: str) -> int:
    """A number of things of which there is at least one.

    Raises:
        ArgumentTypeError: it is none.
    """
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"expected a number from 1 on, got {text!r}")
    return int(text)
