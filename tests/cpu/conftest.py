"""Choice of the matrix library."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from fairseq_plugins.cpu.linear import onednn_is_faster


@pytest.fixture
def prefer_onednn(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """Return a function that chooses oneDNN, ``prefer_onednn(True)``, or MKL."""

    def prefer(choice: bool) -> None:
        monkeypatch.setenv("FAIRSEQ_PLUGINS_ONEDNN", str(int(choice)))
        onednn_is_faster.cache_clear()

    yield prefer
    onednn_is_faster.cache_clear()
