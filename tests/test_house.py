"""The house: importing has no effect, no object changes its class, and a family is added and removed by its folder."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.commands import MAIN, ROOT, hypotheses, python, run

PACKAGE = ROOT / "fairseq_plugins"
TOY = ROOT / "tests" / "toy_family"
FAMILIES = ("convs2s", "weighted_transformer", "conv_encoder")

# Run in a process that has imported fairseq and nothing of this package: what each module changes when it is imported.
EFFECTS = """
import os, sys, warnings, logging, signal
import fairseq_cli.train, fairseq_cli.generate, fairseq_cli.interactive, fairseq_cli.preprocess
import numpy, argparse, sacrebleu
OTHERS = ("fairseq.", "fairseq_cli.", "argparse.", "numpy.", "logging.", "torch.nn.", "torch.optim.", "hydra.")

def things():
    for name, module in list(sys.modules.items()):
        if (name + ".").startswith(OTHERS):
            for key, value in list(vars(module).items()):
                if callable(value):
                    yield f"{name}.{key}", value
                if isinstance(value, type) and (value.__module__ + ".").startswith(OTHERS):
                    for part, attribute in list(vars(value).items()):
                        if callable(attribute) or isinstance(attribute, (property, staticmethod, classmethod)):
                            yield f"{name}.{key}.{part}", attribute

def state():
    root, signals = logging.root, [signal.getsignal(number) for number in (2, 15)]
    others = {"environment": dict(os.environ), "filters": list(warnings.filters), "excepthook": sys.excepthook}
    return dict(things()), {**others, "logging": (root.level, list(root.handlers)), "signals": signals}

before, others = state()
for module in sys.argv[1:]:
    child = os.fork()
    if not child:
        import importlib
        try:
            importlib.import_module(module)
        except ImportError as error:
            if error.name and error.name.partition(".")[0] in ("matplotlib", "onnx", "onnxruntime", "rouge_score"):
                os._exit(0)
            raise
        after, now = state()
        changed = [name for name, value in before.items() if name in after and after[name] is not value]
        changed += [name for name, value in others.items() if now[name] != value]
        if changed:
            print(module, *changed[:5], flush=True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        print(module, "cannot be imported alone", flush=True)
"""


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_importing_has_no_effect() -> None:
    """Each module alone: functions and classes of fairseq, torch and others stay the same objects."""
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in modules()]
    names.remove("fairseq_plugins.export.translate")  # a program, which is copied into folders
    result = python("-c", EFFECTS, *names)
    found = [line for line in result.stdout.splitlines() if line.startswith("fairseq_plugins")]
    assert (result.returncode, found) == (0, []), result.stderr[-3000:]


def test_a_second_installation_does_nothing() -> None:
    program = EFFECTS.partition("before, others")[0] + (
        "import fairseq_plugins; fairseq_plugins.install(); before = state()\n"
        "fairseq_plugins.install(); after = state()\n"
        "print(all(after[0][name] is value for name, value in before[0].items()) and after[1] == before[1])"
    )
    assert python("-c", program).stdout.splitlines()[-1:] == ["True"]


def forbidden(tree: ast.AST) -> Iterator[int]:
    """Lines that change an object's class, patch by `unittest`, or evaluate text."""
    for node in ast.walk(tree):
        targets: list[Any] = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(each, ast.Attribute) and each.attr in ("__class__", "__bases__") for each in targets):
            yield node.lineno
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("unittest"):
            yield node.lineno
        if isinstance(node, ast.Import) and any(name.name.startswith("unittest") for name in node.names):
            yield node.lineno
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
            yield node.lineno


def test_forms_that_the_package_does_not_use() -> None:
    found = [
        f"{path.name}:{line}" for path in modules() for line in forbidden(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert found == []
    wrong = "a.__class__ = B\nA.__bases__ = (B,)\nfrom unittest import mock\nimport unittest.mock\neval('1')\n"
    assert list(forbidden(ast.parse(wrong))) == [1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def toy_model(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    save = tmp_path_factory.mktemp("toy")
    options = ["--arch", "toy_wide", "--optimizer", "adam", "--lr", 0.01, "--max-epoch", 1, "--max-tokens", 200]
    run("train", data, "--user-dir", TOY, *options, "--save-dir", save, "--cpu", "--no-epoch-checkpoints")
    return save / "checkpoint_best.pt"


def test_a_fourth_family_translates(toy_model: Path, data: Path) -> None:
    """With the fast search, as with fairseq's."""
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
    """It trains with the base class's defaults, and its export is offered."""
    for language in ("en", "de"):
        lines = (f"{language} {number} {number % 7} .\n" for number in range(60))
        (tmp_path / f"a.{language}").write_text("".join(lines))
    words = [tmp_path / "a.en", tmp_path / "a.de", tmp_path / "out", "--arch", "toy_wide", "--user-dir", TOY]
    result = python("-c", MAIN, "own-data", *words, "--train", "--max-epoch 1")
    assert result.returncode == 0, result.stderr[-3000:]
    assert "$ fairseq-plugins export" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_removed_by_its_folder(family: str, tmp_path: Path) -> None:
    """The tests of the others pass without it."""
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "mutants", "*.egg-info")
    shutil.copytree(ROOT, tmp_path / "tree", ignore=ignored)
    for folder in ("fairseq_plugins", "tests"):
        shutil.rmtree(tmp_path / "tree" / folder / family)
    others = [f"tests/{other}" for other in FAMILIES if other != family]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", *others]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "tree")}
    result = subprocess.run(
        command, cwd=tmp_path / "tree", env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout[-3000:]
