"""Values written in Python's syntax, read without running anything."""

from __future__ import annotations

import ast
from typing import Any

_MAX_LENGTH = 1000
_MAX_SIZE = 10_000  # values, those inside others included
_MAX_TEXT = 100_000  # characters; the parser takes a thousand bytes and more for each, and deep text can crash it


def literal(text: str) -> Any:
    """The value of a Python literal, with ``+`` between lists and ``*`` between a list and a whole number.

    That is how fairseq writes a stack of layers, ``[(512, 3)] * 9 + [(1024, 3, 1)] * 4``, which it hands to ``eval``.
    Tuples are joined and repeated like lists.

    Raises:
        ValueError: the text is anything else, has more than 100 000 characters, or joins or repeats to more than 1000
            elements, or 10 000 with those inside others.
        TypeError: it is no text.
    """
    if not isinstance(text, str):
        raise TypeError(f"expected text, got {text!r}")
    if len(text) > _MAX_TEXT:
        raise ValueError(f"not a literal of at most {_MAX_TEXT} characters: {text[:100]!r}")
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"not a literal, and nothing else is read: {text[:100]!r}") from error


def _value(node: ast.expr) -> Any:
    match node:
        case ast.BinOp(left, ast.Add() | ast.Mult() as operation, right):
            return _combine(_value(left), operation, _value(right))
        case ast.List(elements):
            return [_value(element) for element in elements]
        case ast.Tuple(elements):
            return tuple(_value(element) for element in elements)
    return ast.literal_eval(node)


def _combine(left: Any, operation: ast.operator, right: Any) -> Any:
    if isinstance(operation, ast.Mult):
        times, values = (left, right) if isinstance(left, int) else (right, left)
        few = type(times) is int and abs(times) <= _MAX_LENGTH
        if few and isinstance(values, list | tuple) and _fits(values, times):
            return values * times
    elif isinstance(left, list | tuple) and type(left) is type(right) and _fits([*left, *right]):
        return type(left)([*left, *right])
    raise ValueError(f"only lists can be joined and repeated, to at most {_MAX_LENGTH} elements, {_MAX_SIZE} in all")


def _fits(values: Any, times: int = 1) -> bool:
    return len(values) * times <= _MAX_LENGTH and _size(values) * times <= _MAX_SIZE


def _size(value: Any) -> int:
    return 1 + sum(map(_size, value)) if isinstance(value, list | tuple) else 1
