"""Values written in Python's syntax, read without running anything."""

from __future__ import annotations

import ast
from typing import Any

__all__ = ["literal"]

_MAX_LENGTH = 1000


def literal(text: str) -> Any:
    """The value of a Python literal, with ``+`` between lists and ``*`` between a list and a whole number.

    That is how fairseq writes a stack of layers, ``[(512, 3)] * 9 + [(1024, 3, 1)] * 4``, which it hands to ``eval``.

    Raises:
        ValueError: the text is anything else, or makes a list of more than 1000 elements.
    """
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"not a literal: {text[:100]!r}") from error


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
    if isinstance(operation, ast.Add) and isinstance(left, list) and isinstance(right, list):
        return left + right
    if isinstance(operation, ast.Mult):
        times, values = (left, right) if isinstance(left, int) else (right, left)
        if type(times) is int and isinstance(values, list) and len(values) * times <= _MAX_LENGTH:
            return values * times
    raise ValueError("only lists can be joined, and repeated a moderate number of times")
