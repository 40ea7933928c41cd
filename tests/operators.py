"""Record the operators that torch runs below its Python interface."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """A context whose ``calls`` list the operators that run, by name, with the type of their first tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, torch.dtype | None]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtypes = [each.dtype for each in args if isinstance(each, torch.Tensor)]
        self.calls.append((str(function._overloadpacket), dtypes[0] if dtypes else None))
        return function(*args, **(kwargs or {}))

    def count(self, name: str) -> int:
        return sum(called == name for called, _ in self.calls)

    def dtypes(self, name: str) -> set[torch.dtype | None]:
        return {dtype for called, dtype in self.calls if called == name}
