"""Run the tests on each Python and with the oldest PyTorch, in separate environments (``make test-matrix``)."""

import shutil
import subprocess

import nox


def starts(interpreter: str) -> bool:
    """Return whether an interpreter starts; pyenv's commands exist even for versions that pyenv refuses to start."""
    found = shutil.which(interpreter)
    return found is not None and not subprocess.run([found, "--version"], capture_output=True, check=False).returncode


@nox.session(venv_backend="none")
@nox.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def suite(session: nox.Session, version: str) -> None:
    """Run ``make test``, which also builds the environment, with one version of Python."""
    make_test(session, version, f"VENV=.nox/{version}")


@nox.session(venv_backend="none")
def oldest_torch(session: nox.Session) -> None:
    """Run ``make test`` with the oldest PyTorch that setup.py allows."""
    make_test(session, "3.10", "VENV=.nox/oldest_torch", "TORCH=torch==2.6.0")


def make_test(session: nox.Session, version: str, *variables: str) -> None:
    """Run ``make test``, or skip the session if this Python is not installed."""
    interpreter = f"python{version}"
    if not starts(interpreter):
        session.skip(f"there is no {interpreter} here")
    session.run("make", "test", f"PYTHON={interpreter}", *variables, external=True)
