"""Compare rows, re-orders and windows with a full history that is re-ordered immediately."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_plugins.common.decoding import RowOrder
from fairseq_plugins.common.source import Source
from fairseq_plugins.convs2s.layers import StepConvolution
from fairseq_plugins.weighted_transformer.layers import Ancestry
from tests.common.stepwise import reorders


def window_itself(window: torch.Tensor) -> torch.Tensor:
    """Return a convolution result whose gated linear unit is the window itself."""
    return torch.cat([window, torch.full_like(window, 100)], dim=1)


def own_places(ancestry: Ancestry, steps: int) -> list[list[int]]:
    """Return the places of each row's own keys for this number of steps."""
    beam = len(ancestry.own)
    places = ancestry.table[:, :, :steps] + torch.arange(0, steps * beam, beam)
    return places.flatten(0, 1).tolist()


@settings(deadline=None, max_examples=200)
@given(reorders())
def test_window_is_the_last_inputs_of_each_history(decoding: tuple[int, int, int, list[list[torch.Tensor]]]) -> None:
    sentences, beam, width, steps = decoding
    torch.manual_seed(1)
    history = torch.zeros(sentences * beam, width, 3)
    sentence_of_row = torch.arange(sentences).repeat_interleave(beam)
    order = RowOrder(sentences * beam, beam)
    window = StepConvolution(window_itself, torch.zeros(sentences * beam, (width - 1) * 3))
    kept = torch.arange(sentences)
    for orders in steps:
        for new_order in orders:
            order.reorder(new_order)
            history, sentence_of_row = history[new_order], sentence_of_row[new_order]
        rows, left = order.take_pending()
        if left is not None:
            before = kept.clone()
            kept = left.of(before)
            assert kept.data_ptr() == before.data_ptr()  # updated in place
        x = torch.randn(history.size(0), 3)
        history = torch.cat([history, x.unsqueeze(1)], dim=1)
        assert torch.equal(window.step(x, rows), history[:, -width:].flatten(1))
        assert torch.equal(kept.repeat_interleave(beam), sentence_of_row)


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
        with pytest.raises(RuntimeError, match=f"has {count} rows: .* multiple of 2, at most 6"):
            order.reorder(torch.arange(count))
    order.reorder(torch.tensor([0, 1, 4, 5]))
    with pytest.raises(RuntimeError, match=r"has 6 rows: .* at most 4"):
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


@settings(deadline=None, max_examples=50)
@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 6), st.booleans())
def test_a_row_looks_at_its_own_ancestors_alone(data, sentences, beam, steps, fixed) -> None:
    """Compare with each row's recorded path: at every step, the column of the row or its ancestor.

    The bias may cover filled places only, or also empty ones.
    """
    ancestry = Ancestry(sentences, beam, 2, torch.device("cpu"), fixed)
    paths: list[list[int]] = [[] for _ in range(sentences * beam)]
    table, capacity = ancestry.table.data_ptr(), 2
    for step in range(steps):
        order = None
        if step and data.draw(st.booleans()):
            order = [s * beam + data.draw(st.integers(0, beam - 1)) for s in range(sentences) for _ in range(beam)]
            paths = [list(paths[row]) for row in order]
        if step == capacity:
            ancestry.grow(3)
            table, capacity = ancestry.table.data_ptr(), capacity + 3
        for row, path in enumerate(paths):
            path.append(row % beam)
        seen = data.draw(st.integers(step + 1, capacity))
        places = ancestry.step(None if order is None else torch.tensor(order), beam, torch.tensor([step]))
        bias = ancestry.bias(seen, torch.float16)
        expected = torch.full((sentences * beam, capacity, beam), -torch.inf, dtype=torch.float16)
        for row, path in enumerate(paths):
            for time, column in enumerate(path):
                expected[row, time, column] = 0
        own = [[time * beam + column for time, column in enumerate(path)] for path in paths]
        assert own_places(ancestry, step + 1) == own
        assert places.tolist() == [step * beam + column for column in range(beam)]
        assert bias.dtype == torch.float16
        assert torch.equal(bias, expected[:, :seen].reshape(sentences, 1, beam, seen * beam))
        assert not fixed or ancestry.table.data_ptr() == table
