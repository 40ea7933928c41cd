"""Parameters that a checkpoint is about to fill: to draw random numbers for them takes longer than to read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# Of torch.nn.init those that ask for a mode themselves; the others come here with what they do to the tensor.
_FILL = {Tensor.normal_, Tensor.uniform_, nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_}

_filled_later = ContextVar("_filled_later", default=False)


@contextmanager
def filled_later() -> Iterator[None]:
    """Of models that are built within, all parameters will be replaced."""
    before = _filled_later.set(True)
    try:
        yield
    finally:
        _filled_later.reset(before)


@contextmanager
def unfilled_where_filled_later() -> Iterator[None]:
    """Inside `filled_later`, parameters that are made within hold whatever was in their memory."""
    with _Unfilled() if _filled_later.get() else nullcontext():
        yield


class _Unfilled(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FILL:
            tensor = kwargs["tensor"] if "tensor" in kwargs else args[0]
            if tensor.requires_grad:  # a parameter, or a part of one
                return tensor
        return func(*args, **kwargs)
