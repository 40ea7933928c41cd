"""No function of fairseq is wrapped twice, so the order of the repairs does not matter."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType


def wrappers(function: object) -> int:
    """Return how many functions of the repairs are around a function of fairseq."""
    found = 0
    while function is not None:
        inner = getattr(function, "__func__", function)
        code = getattr(inner, "__code__", None)
        found += code is not None and "/fairseq_plugins/repairs/" in code.co_filename
        function = getattr(inner, "__wrapped__", None)
    return found


def functions_of_fairseq() -> Iterator[tuple[str, object]]:
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("fairseq", "fairseq_cli") or not isinstance(module, ModuleType):
            continue
        for owner in [module, *(each for each in vars(module).values() if isinstance(each, type))]:
            for attribute, value in list(vars(owner).items()):
                if isinstance(value, FunctionType | MethodType | staticmethod | classmethod):
                    yield f"{owner.__name__}.{attribute}", value


def test_no_function_is_wrapped_twice() -> None:
    wrapped = {name: found for name, value in functions_of_fairseq() if (found := wrappers(value))}
    assert len(wrapped) > 20
    assert {name: found for name, found in wrapped.items() if found > 1} == {}
