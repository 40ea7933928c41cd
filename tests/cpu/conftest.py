"""Which of the two libraries multiplies."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from fairseq_plugins.cpu.linear import onednn_is_faster


@pytest.fixture
def prefer_onednn(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """``prefer_onednn(True)``: as on a processor where oneDNN is faster than MKL, or is not."""

    def prefer(wish: bool) -> None:
        monkeypatch.setenv("FAIRSEQ_PLUGINS_ONEDNN", str(int(wish)))
        onednn_is_faster.cache_clear()

    yield prefer
    onednn_is_faster.cache_clear()
