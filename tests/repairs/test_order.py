"""The table of repairs: each is there once, and no function of fairseq is wrapped twice, so order hardly matters."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from inspect import getmodule, getsource
from types import FunctionType, MethodType, ModuleType

import pytest

from fairseq_plugins import repairs
from fairseq_plugins.repairs import batches, distributed, hub, options, searches, translation


def wrappers(function: object) -> list[str]:
    """The modules of repairs through which a call of it goes."""
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
    """A function of the repairs that replaces one of fairseq's is in the table."""
    offered = {
        each
        for module in vars(repairs).values()
        if isinstance(module, ModuleType) and module.__name__.startswith(f"{repairs.__name__}.")
        for name, each in vars(module).items()
        if isinstance(each, FunctionType) and each.__module__ == module.__name__ and not name.startswith("_")
    }
    table = (*repairs.SAFETY, *repairs.FIXES)
    assert len(table) == len(set(table))
    assert set(table) <= offered
    replacing = {each for each in offered if "in_place_of" in each.__code__.co_names and not each.__code__.co_argcount}
    called = {each for each in replacing if getsource(getmodule(each)).count(f"{each.__name__}()") > 1}
    assert replacing - called <= set(table)


@pytest.mark.parametrize(
    "repair",
    [
        batches.find_buckets_with_numpy_2,
        batches.keep_the_batches_on_resume,
        batches.keep_the_last_batch,
        batches.read_several_parts,
        distributed.follow_torchrun,
        distributed.validate_what_there_is,
        hub.copy_the_state_of_tasks,
        hub.take_the_task_asked_for,
        options.read_first_embedding,
        options.refuse_references,
        searches.count_groups_by_their_place_in_the_batch,
        searches.refuse_without_constraints,
        translation.block_repeated_ngrams,
    ],
)
def test_what_is_right_is_left_alone(repair: repairs.Repair) -> None:
    """As a repaired fairseq is: these probes look at what is there. Others come with an error, or are of the code."""
    before = [value for _, value in functions_of_fairseq()]
    known = set(map(id, before))
    repair()
    assert [name for name, value in functions_of_fairseq() if id(value) not in known] == []
