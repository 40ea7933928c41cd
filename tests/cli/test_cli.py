"""``fairseq-plugins`` imports only the modules that a command needs, and every command applies the repairs."""

from __future__ import annotations

import importlib
import io
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.utils import import_user_module

from fairseq_plugins.cli import main as cli
from fairseq_plugins.cli.user_dir import USER_DIR
from tests.commands import FORKED, MAIN, python


def call(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process that prints its imported modules to stderr at its end."""
    program = f"import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); {MAIN}"
    return python("-c", program, *words)


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], ["user-dir"], *([name, "--help"] for name in cli.COMMANDS)]
)
def test_commands_without_torch_do_not_import_torch(words: list[str]) -> None:
    result = call(*words)
    assert result.returncode == 0
    assert {"torch", "fairseq", "omegaconf"} & set(result.stderr.split()) == set()


MISSING = {
    "average": "{0} --output {1}",
    "export": "{0} {1}",
    "import-fconv": "{0} {1}",
    "lexicon": "--source {0} --target {0} --output {1}",
    "own-data": "{0} {1}.de {1}",
    "plot-attention": "{2} --path {0} --input a --output {1}.svg",
    "plot-branches": "{0} --output {1}.svg",
    "plot-loss": "{0} --output {1}.svg",
    "serve": "{0}",
    "score": "--generated {0} --reference {0}",
    "tune-length": "{0}",
}


@pytest.mark.parametrize("name", [name for name in cli.COMMANDS if name != "user-dir"])
def test_a_missing_file_is_named_before_work_begins(name: str, tmp_path: Path) -> None:
    words = MISSING[name].format(tmp_path / "missing.en", tmp_path / "out", tmp_path).split()
    with pytest.raises(SystemExit, match=rf"{name}: error: (?!\[Errno).*{tmp_path}/missing.en"):
        cli.main([name, *words])
    assert list(tmp_path.iterdir()) == []


def test_help_and_wrong_names() -> None:
    """``--help`` lists all commands, each command has its own help, and the error for a wrong name has the list."""
    shown = call("--help").stdout
    assert [name for name in cli.COMMANDS if f"\n    {name}" not in shown] == []
    assert "Print BLEU, chrF or ROUGE" in call("score", "--help").stdout
    assert "invalid choice: 'scores'" in call("scores").stderr
    assert "required: COMMAND" in call().stderr
    assert "Please install" not in call("average", "--help").stderr, "fairseq asks for tensorboardX on import"


def test_letters_outside_the_encoding_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    tool = SimpleNamespace(__doc__="", add_arguments=lambda parser: None, run=lambda args: print("a\u0308\xe4"))
    monkeypatch.setattr(cli, "find", lambda name: tool)
    monkeypatch.setattr(sys, "stdout", terminal)
    cli.main(["score"])
    terminal.flush()
    assert terminal.buffer.getvalue() == rb"a\u0308\xe4" + b"\n"  # type: ignore[attr-defined]


def forked(target: Callable[[str, Path], None], argument: str, folder: Path) -> str:
    """Return the output of ``target`` in a process that has imported fairseq, but nothing of this plugin."""
    found = folder / "found"
    process = FORKED.Process(target=target, args=(argument, found))
    process.start()
    process.join()
    assert process.exitcode == 0
    return found.read_text()


def test_registration_does_not_import_the_compiler_of_torch() -> None:
    """Importing torch's compiler would add a second and 60 MB to each of fairseq's commands."""
    program = "import sys, fairseq_plugins; fairseq_plugins.install(); assert 'torch._dynamo' not in sys.modules"
    result = python("-c", program)
    assert result.returncode == 0, result.stderr


def import_twice(user_dir: str, found: Path) -> None:
    importlib.import_module("fairseq_plugins")
    import_user_module(Namespace(user_dir=user_dir))
    found.write_text(str("convs2s" in ARCH_MODEL_REGISTRY))


@pytest.mark.parametrize("user_dir", ["user_dir", str(USER_DIR)])
def test_a_folder_registers_after_the_package_is_imported(user_dir: str, tmp_path: Path) -> None:
    assert forked(import_twice, user_dir, tmp_path) == "True"
