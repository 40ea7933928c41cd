"""Progress bars."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm


def bar(items: Iterable[Any] | None = None, *, desc: str, **options: Any) -> Any:
    """Return a ``tqdm`` bar; if stderr is not a terminal, print the text of ``desc`` once instead of the bar."""
    if not sys.stderr.isatty():
        print(desc, file=sys.stderr, flush=True)
    return tqdm(items, desc=desc, disable=None, **options)
