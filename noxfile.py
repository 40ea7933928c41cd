"""The suite on each supported Python, in environments of its own: ``make test-matrix``."""

import shutil
import subprocess

import nox


def starts(interpreter: str) -> bool:
    """pyenv has a file of that name for each version that it knows, also for those that it would not start here."""
    found = shutil.which(interpreter)
    return found is not None and not subprocess.run([found, "--version"], capture_output=True, check=False).returncode


@nox.session(venv_backend="none")
@nox.parametrize("version", ["3.10", "3.11", "3.12"])
def suite(session: nox.Session, version: str) -> None:
    """``make test`` as a user of this Python has it, set-up included."""
    interpreter = f"python{version}"
    if not starts(interpreter):
        session.skip(f"there is no {interpreter} here")
    session.run("make", "test", f"PYTHON={interpreter}", f"VENV=.nox/{version}", external=True)
