"""The table in `docs/reliability.md` lists every place where fairseq turns a value into code, imports or commands."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import fairseq
import fairseq_cli
import pytest
from fairseq.logging.meters import MetersDict

from tests.commands import ROOT

CALLS = re.compile(
    r"(eval|exec|compile|__import__|globals)|.*\b(import_module|import_user_module|locate|instantiate|extractall)"
    r"|(torch\.hub|torch\.jit|torch|np|numpy|yaml|joblib|dill|marshal|shelve)\.load|c?[pP]ickle\.\w*[lL]oads?\w*"
    r"|os\.(system|popen|exec\w+|spawn\w+)|subprocess\.\w+"
)


def kind(call: ast.Call) -> str:
    """Return the name by which the table lists such calls."""
    name = ast.unparse(call.func)
    if name.startswith(("subprocess.", "pickle.")):
        return name.partition(".")[0]
    return name if name.endswith(".load") else name.rpartition(".")[2]


def calls(package: str) -> Iterator[tuple[str, ast.Call]]:
    """Yield file and call for each call that may run code."""
    root = Path(package).parent
    for path in sorted(root.rglob("*.py")):
        if path.relative_to(root).parts[0] == "examples":
            continue  # separate programs
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and CALLS.fullmatch(ast.unparse(node.func)):
                yield path.relative_to(root.parent).as_posix(), node


@pytest.fixture(scope="module")
def found() -> list[tuple[str, ast.Call]]:
    return [*calls(fairseq.__file__), *calls(fairseq_cli.__file__)]


def test_every_place_is_in_the_list(found: list[tuple[str, ast.Call]]) -> None:
    text = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    places = [line.split("|")[1] for line in text.split("\n") if line.startswith("|")]
    assert len(found) > 50
    for path, call in found:
        listed = [place for place in places if f"`{path}`" in place and f"`{kind(call)}" in place]
        assert listed, f"{path}, line {call.lineno}: {ast.unparse(call)}"


def test_numpy_never_loads_pickles(found: list[tuple[str, ast.Call]]) -> None:
    for path, call in found:
        assert "allow_pickle" not in [keyword.arg for keyword in call.keywords], path


@pytest.mark.parametrize("name", ["eval", "exec", "__builtins__", "torch", "OrderedDict", "nothing"])
def test_a_saved_meter_must_have_a_known_class(name: str) -> None:
    with pytest.raises((TypeError, KeyError, AttributeError)):
        MetersDict().load_state_dict([(0, "loss", name, "__import__('os').getcwd()")])
