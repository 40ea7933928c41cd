"""The table of repairs: all are there, and each function of fairseq has one wrapper, so that order hardly matters."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType

from fairseq_plugins import compat


def wrappers(function: object) -> list[str]:
    """The modules of compat through which a call of it goes."""
    found = []
    while function is not None:
        inner = getattr(function, "__func__", function)
        code = getattr(inner, "__code__", None)
        if code is not None and "/fairseq_plugins/compat/" in code.co_filename:
            found.append(code.co_filename.rpartition("/")[2])
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
    assert {name: found for name, found in wrapped.items() if len(found) > 1} == {}


def test_all_repairs_are_in_the_table() -> None:
    """What the modules of compat offer and takes nothing, is one; memory is a command's own business."""
    offered = {
        getattr(module, name)
        for module in vars(compat).values()
        if isinstance(module, ModuleType) and module.__name__.startswith(f"{compat.__name__}.")
        for name in getattr(module, "__all__", ())
        if not module.__name__.endswith(".memory")
    }
    repairs = {each for each in offered if isinstance(each, FunctionType) and not each.__code__.co_argcount}
    assert not compat.SAFETY.keys() & compat.KINDNESS.keys()
    assert {*compat.SAFETY, *compat.KINDNESS} == {each for each in repairs if each.__name__ != "lost_patience"}
    assert {first for needed in compat.KINDNESS.values() for first in needed} <= {*compat.SAFETY, *compat.KINDNESS}
