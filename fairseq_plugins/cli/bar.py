"""How far something is: a bar on a terminal, a line elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm


def bar(items: Iterable[Any] | None = None, *, desc: str, **options: Any) -> Any:
    """``tqdm`` on a terminal; elsewhere one line, ``desc``, at the beginning."""
    if not sys.stderr.isatty():
        print(desc, file=sys.stderr, flush=True)
    return tqdm(items, desc=desc, disable=None, **options)
