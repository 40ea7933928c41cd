"""Rows, re-orders and windows against a history that is simply kept and re-ordered at once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_plugins.nn.decoder_state import RowOrder, Window


@st.composite
def decodings(draw: st.DrawFn) -> tuple[int, int, int, list[list[torch.Tensor]]]:
    """Sentences, beam and window width, and for each step the re-orders that come before it."""
    sentences, beam, width = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 5))
    left, steps = sentences, []
    for _ in range(draw(st.integers(1, 8))):
        orders = []
        for _ in range(draw(st.integers(0, 2))):
            stay = sorted(draw(st.sets(st.integers(0, left - 1), min_size=1)))
            rows = [s * beam + draw(st.integers(0, beam - 1)) for s in stay for _ in range(beam)]
            orders.append(torch.tensor(rows))
            left = len(stay)
        steps.append(orders)
    return sentences, beam, width, steps


@settings(deadline=None, max_examples=200)
@given(decodings())
def test_window_is_the_last_inputs_of_each_history(decoding: tuple[int, int, int, list[list[torch.Tensor]]]) -> None:
    sentences, beam, width, steps = decoding
    torch.manual_seed(1)
    history = torch.zeros(sentences * beam, width, 3)
    sentence_of_row = torch.arange(sentences).repeat_interleave(beam)
    order, window = RowOrder(sentences * beam, beam), Window(sentences * beam, width, 3, like=history)
    kept = torch.arange(sentences)
    for orders in steps:
        for new_order in orders:
            order.reorder(new_order)
            history, sentence_of_row = history[new_order], sentence_of_row[new_order]
        rows, left = order.take()
        if left is not None:
            kept = kept[left]
        x = torch.randn(history.size(0), 3)
        history = torch.cat([history, x.unsqueeze(1)], dim=1)
        assert torch.equal(window.push(x, rows), history[:, -width:])
        assert torch.equal(kept.repeat_interleave(beam), sentence_of_row)


@pytest.mark.parametrize(
    "new_order",
    [
        [2, 0, 1, 3],  # a row changes its sentence
        [2, 3, 0, 1],  # sentences change places
        [0, 1, 0, 1],  # a sentence is there twice
        [0, 1, 2],  # part of a sentence leaves
    ],
)
def test_orders_that_break_the_contract_are_refused(new_order: list[int]) -> None:
    with pytest.raises(ValueError, match="cannot re-order 4 rows of 2 per sentence"):
        RowOrder(rows=4, beam=2).reorder(torch.tensor(new_order))
