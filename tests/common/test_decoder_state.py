"""Re-orders that break the contract are refused, on a GPU without synchronisation."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_plugins.common.decoding import RowOrder
from fairseq_plugins.common.source import Source


def test_orders_that_break_the_contract_are_refused() -> None:
    """Try all orders of two or four of four rows, with two rows per sentence, and impossible numbers of rows."""
    for left in (2, 4):
        for rows in itertools.product(range(4), repeat=left):
            sentences = [row // 2 for row in rows]
            allowed = sentences[::2] == sentences[1::2] and (left < 4 or sentences[::2] == [0, 1])
            with nullcontext() if allowed else pytest.raises(RuntimeError):
                RowOrder(rows=4, beam=2).reorder(torch.tensor(rows))
    order = RowOrder(rows=6, beam=2)
    for count in (3, 8):
        with pytest.raises(RuntimeError, match=f"6 rows .* to {count}"):
            order.reorder(torch.arange(count))
    order.reorder(torch.tensor([0, 1, 4, 5]))
    with pytest.raises(RuntimeError, match=r"4 rows .* to 6"):
        order.reorder(torch.arange(6))


class Asserted(TorchDispatchMode):
    """Collect the assertions that run on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.asserted: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._assert_async.msg:
            self.asserted.append(args[0])
        return func(*args, **(kwargs or {}))


def test_the_device_checks_orders_and_rows_without_synchronisation() -> None:
    """On a fake GPU, reading a tensor's value raises an error."""
    with FakeTensorMode(), Asserted() as mode:
        empty = partial(torch.empty, dtype=torch.long, device="cuda")
        order = RowOrder(rows=6, beam=2)
        order.reorder(empty(6))
        order.reorder(empty(4))
        keys = empty(3, 5, 8, dtype=torch.float32)
        source = Source(keys, keys, empty(3, 5, dtype=torch.bool)).reorder(empty(6))
        assert source.group()[1] == 2
    assert [(value.device.type, value.shape) for value in mode.asserted] == [("cuda", ())] * 3
