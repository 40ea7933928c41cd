"""Parameters that a checkpoint is about to fill: to draw random numbers for them takes longer than to read it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# The functions of torch.nn.init that ask for a mode themselves; the others call these methods.
_FILL = {Tensor.normal_, Tensor.uniform_, nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_}


class Unfilled(TorchFunctionMode):
    """A context in which new parameters hold whatever was in their memory."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FILL:
            tensor = kwargs["tensor"] if "tensor" in kwargs else args[0]
            if tensor.requires_grad:  # a parameter, or a part of one
                return tensor
        return func(*args, **kwargs)
