"""Each function of fairseq is wrapped once, even if the installation is interrupted, and keeps its kind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType

import pytest

from fairseq_plugins import repairs
from fairseq_plugins.repairs import wrapping
from fairseq_plugins.repairs.wrapping import replace


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


def test_an_interrupted_installation_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(wrapping, "REPAIRS", registered := [])
    monkeypatch.setattr(repairs, "REPAIRS", registered)
    wrapping.repair(lambda: done.append("first"))
    wrapping.repair(lambda: done.append(done[1]))
    with pytest.raises(IndexError):
        repairs.repair_fairseq()
    done.append("second")
    repairs.repair_fairseq()
    assert done == ["first", "second", "second"]


def test_methods_of_a_class_keep_their_class() -> None:
    class Base:
        @classmethod
        def name(cls) -> str:
            return cls.__name__

        @staticmethod
        def double(number: int) -> int:
            return 2 * number

    class Part(Base):
        pass

    for name in ("name", "double"):
        replace(Base, name, lambda original, *words: (original(*words),))
    for owner in (Part, Part()):
        assert (owner.name(), owner.double(2)) == (("Part",), (4,))
