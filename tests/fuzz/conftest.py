"""Every test here runs within limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.trial import limits


@pytest.fixture(autouse=True)
def within_limits() -> Iterator[None]:
    with limits():
        yield


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file in a folder of its own, to be written again and again."""
    return tmp_path_factory.mktemp("fuzz") / "file"
