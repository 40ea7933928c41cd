"""Every fuzz test runs within limits of time and memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.trial import limits


@pytest.fixture(autouse=True)
def within_limits() -> Iterator[None]:
    with limits():
        yield


@pytest.fixture(scope="module")
def file() -> Iterator[Path]:
    """Return a file in a folder of its own, in memory, because writes to a disk would take long."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder, "file")
