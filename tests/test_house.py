"""House rules: importing has no effect, no object changes its class, and a family is added or removed as a folder."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import MAIN, ROOT, hypotheses, python, run, run_own_data

PACKAGE = ROOT / "fairseq_plugins"
TOY = ROOT / "tests" / "toy_family"
ROOMS = ROOT / "examples" / "architectures" / "rooms.py"
FAMILIES = {"convs2s", "weighted_transformer", "conv_encoder"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_importing_has_no_effect() -> None:
    """No module, imported alone, changes code of fairseq, torch, numpy and others, or settings of the process."""
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in modules()]
    result = python("-m", "tests.effects", *names)
    found = dict(json.loads(line) for line in result.stdout.splitlines())
    assert list(found) == names, result.stderr[-3000:]
    # onnxruntime reads its setting about telemetry during its import.
    assert set(found.pop("fairseq_plugins.export.translate")) <= {"environment"}
    assert {name: effects for name, effects in found.items() if effects} == {}


def test_a_second_installation_does_nothing() -> None:
    program = (
        "import fairseq_plugins; from tests.effects import Before\n"
        "fairseq_plugins.install(command=True); before = Before()\n"
        "fairseq_plugins.install(command=True); print(before.changes())"
    )
    result = python("-c", program, fork=False)
    assert result.stdout.splitlines()[-1:] == ["[]"], result.stderr[-3000:]


def forbidden(tree: ast.AST) -> Iterator[int]:
    """Yield lines that change an object's class, patch by `unittest`, evaluate text, or use context variables."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr="__class__" | "__bases__", ctx=ast.Store()):
                yield node.lineno
            case ast.Call(args=[_, ast.Constant("__class__" | "__bases__"), _]):  # setattr
                yield node.lineno
            case ast.ImportFrom(module="unittest" | "unittest.mock" | "mock" | "contextvars"):
                yield node.lineno
            case ast.Import(names) if {each.name for each in names} & {"unittest.mock", "mock", "contextvars"}:
                yield node.lineno
            case ast.Call(ast.Name("eval" | "exec")):
                yield node.lineno


def test_forms_that_the_package_does_not_use() -> None:
    found = [
        f"{path.name}:{line}" for path in modules() for line in forbidden(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert found == []


# A package may import packages from its own row and from the rows above.
FLOORS = [
    {"cpu"},
    {"common"},
    {*FAMILIES, "vocabulary", "search", "sequence_risk", "export"},
    {"cli"},
]


def test_imports_point_down() -> None:
    """Families do not import each other, and no package imports a family or the repairs."""
    rooms = runpy.run_path(str(ROOMS))
    graph = rooms["read_imports"]()
    below: set[str] = set()
    for floor in FLOORS:
        for room in floor:
            assert graph[room] <= (below | floor) - {"repairs", *FAMILIES}, room
        below |= floor
    assert graph["repairs"] <= below - {"cli", *FAMILIES}
    assert graph.keys() == below | {"repairs"}


def test_the_picture_of_packages_has_their_imports() -> None:
    rooms = runpy.run_path(str(ROOMS))
    drawn = rooms["draw"](*rooms["reduce"](rooms["read_imports"]()))  # `reduce` raises an error for cycles
    redraw = "python examples/architectures/rooms.py docs/rooms.svg"
    assert (ROOT / "docs" / "rooms.svg").read_text(encoding="utf-8") == drawn, redraw


@pytest.fixture(scope="module")
def toy_model(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    save = tmp_path_factory.mktemp("toy")
    options = ["--arch", "toy_wide", "--optimizer", "adam", "--lr", 0.01, "--max-epoch", 1, "--max-tokens", 200]
    run("train", data, "--user-dir", TOY, *options, "--save-dir", save, "--cpu", "--no-epoch-checkpoints")
    return save / "checkpoint_best.pt"


def test_a_fourth_family_translates(toy_model: Path, data: Path) -> None:
    """The toy family has the same translations with the fast search and with fairseq's search."""
    options = [data, "--user-dir", TOY, "--path", toy_model, "--gen-subset", "valid", "--cpu", "--max-tokens", 200]
    slow, fast = (
        hypotheses(run("generate", *options, "--task", task).stdout) for task in ("translation", "translation_fast")
    )
    assert slow == fast != {}


def test_a_fourth_family_is_exported_and_drawn(toy_model: Path, data: Path, tmp_path: Path) -> None:
    """The folder translates as fairseq-interactive does, and the picture shows its attention."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("matplotlib")
    text = tmp_path / "text"
    text.write_text("w1 w2 w3\nw4\nw7 w0 w9\n")
    exported = [toy_model, tmp_path / "folder", "--data", data, "--user-dir", TOY]
    assert python("-c", MAIN, "export", *exported).returncode == 0
    command = [sys.executable, "-I", str(tmp_path / "folder" / "translate.py"), "--input", str(text)]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    options = [data, "--user-dir", TOY, "--path", toy_model, "--cpu", "--beam", 5, "--input", text]
    expected = run("interactive", *options, "--task", "translation_fast").stdout
    assert found == re.findall(r"^D-\d+\t\S+\t(.*)$", expected, flags=re.MULTILINE)
    picture = [data, "--path", toy_model, "--input", text, "--user-dir", TOY, "--output", tmp_path / "picture.png"]
    drawn = python("-c", MAIN, "plot-attention", *picture)
    assert drawn.returncode == 0, drawn.stderr[-3000:]


def test_a_fourth_family_is_known_to_own_data(tmp_path: Path) -> None:
    """The toy family is trained with the defaults of the base class, and own-data offers its export."""
    for language in ("en", "de"):
        lines = (f"{language} {number} {number % 7} .\n" for number in range(60))
        (tmp_path / f"a.{language}").write_text("".join(lines))
    words = [tmp_path / "a.en", tmp_path / "a.de", tmp_path / "out", "--arch", "toy_wide", "--user-dir", TOY]
    result = run_own_data(*words, "--train", "--max-epoch 1")
    assert result.returncode == 0, result.stderr[-3000:]
    assert "$ fairseq-plugins export" in result.stderr


# The editable installation would find the family in its own tree.
ONLY_HERE = """import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]
"""


def run_without(family: str, tree: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Run Python in a copy of this tree without a family and its tests."""
    if not tree.exists():
        ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "mutants", "*.egg-info")
        shutil.copytree(ROOT, tree, ignore=ignored)
        for folder in ("fairseq_plugins", "tests"):
            shutil.rmtree(tree / folder / family)
        (tree / "sitecustomize.py").write_text(ONLY_HERE)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_family_is_removed_with_its_folder(family: str, tmp_path: Path) -> None:
    """The other families are registered, and a command that requires the missing family says so."""
    tree, checkpoint = tmp_path / "tree", tmp_path / "checkpoint.pt"
    program = "import fairseq_plugins; fairseq_plugins.install()\n"
    program += "from fairseq.models import MODEL_REGISTRY; print(*MODEL_REGISTRY)"
    registered = set(run_without(family, tree, "-c", program).stdout.split())
    assert registered & FAMILIES == FAMILIES - {family}
    checkpoint.touch()
    refused = run_without(family, tree, "-c", MAIN, "import-fconv", checkpoint, tmp_path / "new.pt").stderr
    assert ("import-fconv: no model family converts fconv" in refused) == (family == "convs2s")


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_others_pass_their_tests_without_a_family(family: str, tmp_path: Path) -> None:
    """The other families' tests pass, and so do tests of other packages that are parametrised by their names."""
    folders = [path.name for path in (ROOT / "tests").glob("*/") if path.name not in ("toy_family", family)]
    ignored = [
        f"--ignore={path.relative_to(ROOT)}"
        for path in (ROOT / "tests").glob("*/test_*.py")
        if f"fairseq_plugins.{family}" in path.read_text(encoding="utf-8")
    ]
    chosen = f"({' or '.join(sorted(FAMILIES - {family}))}) and not {family}"
    words = ["-m", "pytest", "-q", "-m", "not slow", "-k", chosen, *ignored, *(f"tests/{name}" for name in folders)]
    result = run_without(family, tmp_path / "tree", *words)
    assert result.returncode == 0, result.stdout[-5000:]
    assert int(re.findall(r"(\d+) passed", result.stdout)[-1]) > 500
