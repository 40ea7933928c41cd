"""``fairseq-plugins``: fast start, early errors, and standard streams that are closed or full."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fairseq_plugins.cli import main as cli
from fairseq_plugins.cli.arguments import USER_DIR
from tests.commands import MAIN, ROOT, python


def without_torch(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process that prints its imported modules to stderr at its end."""
    program = f"import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); {MAIN}"
    result = python("-c", program, *words, fork=False)
    assert {"torch", "fairseq", "omegaconf"}.isdisjoint(result.stderr.split())
    return result


@pytest.mark.parametrize("words", [["--version"], ["user-dir"], *([name, "--help"] for name in cli.COMMANDS)])
def test_commands_without_torch_do_not_import_torch(words: list[str]) -> None:
    assert without_torch(*words).returncode == 0


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
def test_a_missing_file_is_named_at_once(name: str, tmp_path: Path) -> None:
    """The import of torch and fairseq would take seconds."""
    words = MISSING[name].format(tmp_path / "missing.en", tmp_path / "out", tmp_path).split()
    result = without_torch(name, *words)
    assert result.returncode == 1
    assert f"{tmp_path}/missing.en" in result.stderr.splitlines()[0]
    assert list(tmp_path.iterdir()) == []


def test_help_and_wrong_names() -> None:
    """``--help`` lists all commands, and the error for a wrong name has the list."""
    shown = without_torch("--help").stdout
    assert [name for name in cli.COMMANDS if f"\n    {name}" not in shown] == []
    wrong = without_torch("unheard-of").stderr
    assert "'unheard-of'" in wrong
    assert [name for name in cli.COMMANDS if name not in wrong] == []
    assert "COMMAND" in without_torch().stderr


def test_letters_outside_the_encoding_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    tool = SimpleNamespace(__doc__="", add_arguments=lambda parser: None, run=lambda args: print("a\u0308\xe4"))
    monkeypatch.setattr(cli, "find", lambda name: tool)
    monkeypatch.setattr(sys, "stdout", terminal)
    cli.main(["score"])
    terminal.flush()
    assert terminal.buffer.getvalue() == rb"a\u0308\xe4" + b"\n"  # type: ignore[attr-defined]


def test_registration_does_not_import_the_compiler_of_torch() -> None:
    """Importing torch's compiler would add a second and 60 MB to each of fairseq's commands."""
    program = "import sys, fairseq_plugins; fairseq_plugins.install(); assert 'torch._dynamo' not in sys.modules"
    result = python("-c", program, fork=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("user_dir", ["user_dir", USER_DIR])
def test_a_folder_registers_after_the_package_is_imported(user_dir: str | Path) -> None:
    program = "import sys, fairseq_plugins; from fairseq import models, utils; from types import SimpleNamespace\n"
    program += "utils.import_user_module(SimpleNamespace(user_dir=sys.argv[1]))\n"
    program += "assert 'convs2s' in models.ARCH_MODEL_REGISTRY"
    assert python("-c", program, user_dir).returncode == 0


def shell(redirection: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = ["bash", "-c", f'"$@" {redirection}', "bash", sys.executable, "-c", MAIN, *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("redirection", "status"), [("<&-", 0), ("2>&-", 0), ("<&- 2>&-", 0), (">&-", 1), (">/dev/full", 1)]
)
def test_only_an_output_that_cannot_be_written_is_an_error(redirection: str, status: int) -> None:
    result = shell(redirection, "user-dir")
    assert result.returncode == status
    assert result.stdout.endswith("user_dir\n") == (not status)
    assert result.stderr.count("\n") == result.stderr.count("fairseq-plugins: error: ") == status


def test_a_command_ends_silently_if_its_reader_exits() -> None:
    """The reader exits before the command writes to the pipe."""
    result = shell("| true; exit ${PIPESTATUS[0]}", "--help")
    assert result.stderr == ""
    assert result.returncode in (0, 128 + signal.SIGPIPE)


def test_a_closed_input_that_is_to_be_translated_is_named(tmp_path: Path) -> None:
    result = shell("<&-", "own-data", "a.en", "b.de", tmp_path, "--translate", "-")
    assert result.returncode == 1
    assert result.stderr.startswith("fairseq-plugins own-data: error: --translate")
