"""Standard streams that are closed, full, or without a reader cause no traceback and no silent loss."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import MAIN, ROOT


def shell(redirection: str, *words: object) -> subprocess.CompletedProcess[str]:
    """Run the command in a shell with redirections."""
    script = f'"$@" {redirection}'
    command = ["bash", "-c", script, "bash", sys.executable, "-c", MAIN, *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("closed", ["<&-", "2>&-", "<&- 2>&-"])
def test_streams_that_are_not_needed_may_be_closed(closed: str) -> None:
    result = shell(closed, "user-dir")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.endswith("user_dir\n")


@pytest.mark.parametrize(
    ("redirection", "message"), [(">&-", "closed; redirect it to a file"), (">/dev/full", "No space left on device")]
)
def test_an_output_that_cannot_be_written_is_named(redirection: str, message: str) -> None:
    result = shell(redirection, "user-dir")
    assert result.returncode == 1
    assert result.stderr.startswith("fairseq-plugins: error: ")
    assert result.stderr.endswith(f"{message}\n")
    assert result.stderr.count("\n") == 1


def test_a_command_ends_silently_if_its_reader_exits() -> None:
    """The reader exits before the command writes to the pipe."""
    result = shell("| true; exit ${PIPESTATUS[0]}", "--help")
    assert result.stderr == ""
    assert result.returncode in (0, 128 + signal.SIGPIPE)


def test_a_closed_input_that_is_to_be_translated_is_named(tmp_path: Path) -> None:
    result = shell("<&-", "own-data", "a.en", "b.de", tmp_path, "--translate", "-")
    assert result.returncode == 1
    assert "--translate -: the standard input is closed" in result.stderr
    assert "Traceback" not in result.stderr
