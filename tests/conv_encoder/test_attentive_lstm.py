"""Compare the attentive LSTM with its equations, computed step by step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fairseq_plugins.common.source import Source
from fairseq_plugins.conv_encoder.decoder import AttentiveLSTM

BATCH, TARGET, SOURCE, EMBED, HIDDEN = 3, 6, 5, 4, 7


def by_the_equations(lstm: AttentiveLSTM, g: Tensor, source: Source) -> tuple[Tensor, Tensor]:
    """Compute section 2 of Gehring et al. 2016 with torch's LSTM cell."""
    cell = nn.LSTMCell(2 * EMBED, HIDDEN, dtype=g.dtype)
    del cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh
    cell.weight_ih = torch.cat([lstm.input.weight, lstm.conditional_input.weight], dim=1)  # multiplies [g_i c_i]
    cell.weight_hh, cell.bias_ih = lstm.recurrent.weight, lstm.input.bias
    cell.bias_hh = torch.zeros_like(lstm.input.bias)
    h = c = g.new_zeros(len(g), HIDDEN)
    states, attention = [], []
    for g_i in g.unbind(dim=1):
        d = lstm.query(h) + g_i
        scores = (source.keys * d.unsqueeze(1)).sum(dim=2).masked_fill(source.padding_mask, float("-inf"))
        a = scores.softmax(dim=1)
        conditional_input = (a.unsqueeze(2) * source.values).sum(dim=1)
        h, c = cell(torch.cat([g_i, conditional_input], dim=1), (h, c))
        states.append(h)
        attention.append(a)
    return torch.stack(states, dim=1), torch.stack(attention, dim=1)


@pytest.fixture
def inputs() -> tuple[AttentiveLSTM, Tensor, Source]:
    torch.manual_seed(1)
    lstm = AttentiveLSTM(EMBED, HIDDEN).double()
    g = torch.randn(BATCH, TARGET, EMBED, dtype=torch.float64, requires_grad=True)
    keys, values = (torch.randn(BATCH, SOURCE, EMBED, dtype=torch.float64, requires_grad=True) for _ in range(2))
    padding = torch.arange(SOURCE) >= torch.tensor([5, 2, 1]).unsqueeze(1)
    return lstm, g, Source(keys, values, padding)


def test_values_and_gradients(inputs: tuple[AttentiveLSTM, Tensor, Source]) -> None:
    lstm, g, source = inputs
    leaves = [g, source.keys, source.values, *lstm.parameters()]
    actual, expected = lstm(g, source), by_the_equations(lstm, g, source)
    weights = torch.randn_like(expected[0])
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad((h * weights).sum(), leaves) for h, _ in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


def test_some_inputs_without_gradient(inputs: tuple[AttentiveLSTM, Tensor, Source]) -> None:
    """If embeddings are frozen, for example, only some inputs need a gradient."""
    lstm, g, source = inputs
    h, a = lstm(g.detach(), Source(source.keys.detach(), source.values, source.padding_mask))
    assert not a.requires_grad
    h.sum().backward()
    expected, _ = by_the_equations(lstm, g, source)
    torch.testing.assert_close(source.values.grad, torch.autograd.grad(expected.sum(), source.values)[0])


def test_packed_weights(inputs: tuple[AttentiveLSTM, Tensor, Source]) -> None:
    """In float32 on the CPU, the loop's weights are packed; changed weights must be packed again."""
    lstm, g, source = inputs
    lstm, source = lstm.float(), Source(source.keys.float(), source.values.float(), source.padding_mask)
    for _ in range(2):
        h, _ = lstm(g.float(), source)
        torch.testing.assert_close(h, by_the_equations(lstm, g.float(), source)[0], rtol=1e-5, atol=1e-5)
        for parameter in lstm.parameters():
            parameter.data.mul_(1.5)
