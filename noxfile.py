"""The suite on each supported Python and with the oldest PyTorch, each in its own place: ``make test-matrix``."""

import shutil
import subprocess

import nox


def starts(interpreter: str) -> bool:
    """pyenv has a file of that name for each version that it knows, also for those that it would not start here."""
    found = shutil.which(interpreter)
    return found is not None and not subprocess.run([found, "--version"], capture_output=True, check=False).returncode


@nox.session(venv_backend="none")
@nox.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def suite(session: nox.Session, version: str) -> None:
    """``make test`` as a user of this Python has it, set-up included."""
    make_test(session, version, f"VENV=.nox/{version}")


@nox.session(venv_backend="none")
def oldest_torch(session: nox.Session) -> None:
    """The same with the oldest PyTorch that setup.py allows."""
    make_test(session, "3.10", "VENV=.nox/oldest_torch", "TORCH=torch==2.6.0")


def make_test(session: nox.Session, version: str, *variables: str) -> None:
    """Skipped where there is no such Python."""
    interpreter = f"python{version}"
    if not starts(interpreter):
        session.skip(f"there is no {interpreter} here")
    session.run("make", "test", f"PYTHON={interpreter}", *variables, external=True)
