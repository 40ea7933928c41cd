"""The table of repairs is complete, and no function of fairseq is wrapped twice."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from inspect import getmodule, getsource
from types import FunctionType, MethodType, ModuleType

import pytest

from fairseq_plugins import repairs
from fairseq_plugins.repairs import epochs, hub, translating

TABLE = (*repairs.SAFETY, *repairs.RESUMING, *repairs.DISTRIBUTED, *repairs.SPEED, *repairs.TRANSLATING)


def wrappers(function: object) -> list[str]:
    """Return the modules of repairs that wrap the function."""
    found = []
    while function is not None:
        inner = getattr(function, "__func__", function)
        code = getattr(inner, "__code__", None)
        if code is not None and "/fairseq_plugins/repairs/" in code.co_filename:
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
    """A function without arguments that wraps a function of fairseq is a repair, unless a repair calls it."""
    offered = {
        each
        for module in vars(repairs).values()
        if isinstance(module, ModuleType) and module.__name__.startswith(f"{repairs.__name__}.")
        for name, each in vars(module).items()
        if isinstance(each, FunctionType) and each.__module__ == module.__name__ and not name.startswith("_")
    }
    assert len(TABLE) == len(set(TABLE))
    assert set(TABLE) <= offered
    replacing = {each for each in offered if "wrap" in each.__code__.co_names and not each.__code__.co_argcount}
    called = {each for each in replacing if getsource(getmodule(each)).count(f"{each.__name__}()") > 1}
    assert len(replacing) > 20
    assert replacing - called <= set(TABLE)


@pytest.mark.parametrize(
    "repair",
    [
        epochs.keep_the_last_batch,
        hub.use_given_task,
        translating.block_repeated_ngrams,
    ],
)
def test_a_repaired_fairseq_is_left_alone(repair: repairs.Repair) -> None:
    """The probes of these repairs call fairseq or read its code; other probes are tested elsewhere or do not exist."""
    before = [value for _, value in functions_of_fairseq()]
    known = set(map(id, before))
    repair()
    assert [name for name, value in functions_of_fairseq() if id(value) not in known] == []
