"""Safe parsing of Python literals."""

from __future__ import annotations

import ast
from typing import Any

_MAX_LENGTH = 1000
_MAX_SIZE = 10_000  # values, including nested ones
_MAX_TEXT = 100_000  # characters; Python's parser needs over 1000 bytes per character, and crashes on deep nesting


def literal(text: str) -> Any:
    """Return the value of a Python literal that may join lists by ``+`` and repeat a list by ``*`` and an integer.

    fairseq's options contain such text, for example ``[(512, 3)] * 9 + [(1024, 3, 1)] * 4``.  fairseq passes it to
    ``eval``, which runs any code.  Tuples can be joined and repeated like lists.

    Raises:
        ValueError: the text is not such a literal, has more than 100 000 characters, or a result has more than 1000
            elements, or more than 10 000 elements including nested ones.
        TypeError: the argument is not a string.
    """
    if not isinstance(text, str):
        raise TypeError(f"expected text, got {text!r}")
    if len(text) > _MAX_TEXT:
        raise ValueError(f"{text[:100]!r}... has {len(text)} characters, at most {_MAX_TEXT} are allowed; shorten it")
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(
            f"{text[:100]!r} is not a literal of at most {_MAX_LENGTH} elements; write numbers, quoted text, or lists "
            "of them, such as '[1, 2] * 3'"
        ) from error


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
    raise ValueError(
        f"only lists can be joined and repeated, up to {_MAX_LENGTH} elements, {_MAX_SIZE} including nested ones"
    )


def _fits(values: Any, times: int = 1) -> bool:
    return len(values) * times <= _MAX_LENGTH and _size(values) * times <= _MAX_SIZE


def _size(value: Any) -> int:
    return 1 + sum(map(_size, value)) if isinstance(value, list | tuple) else 1
