"""Incremental decoding of the LSTM decoder with attention.

B sentences, k rows (hypotheses) per sentence, R = B·k rows, S source positions, H units, f embedding width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from fairseq_plugins.common.decoding import KeptSentences, StepwiseDecoding, reorder_rows, update_state
from fairseq_plugins.common.source import Source, softmax
from fairseq_plugins.cpu.packing import with_packing

if TYPE_CHECKING:
    from fairseq_plugins.conv_encoder.decoder import AttentiveLSTM, LSTMDecoder


class ConvEncoderDecoding(StepwiseDecoding):
    """The decode-time state of the LSTM decoder for one batch."""

    decoder: LSTMDecoder

    def set_up(self) -> None:
        """Prepare one matrix and the initial state for each LSTM, and project the source for attention."""
        to_embedding, attentive = self.decoder.to_embedding, self.decoder.attentive
        self.to_embedding = self.prepare(to_embedding.weight, to_embedding.bias)
        self.attention = ConditionalInput(with_packing(attentive, self.packing), self.source)
        self.lstms = [self._lstm(attentive.input.weight, attentive.recurrent.weight, attentive.input.bias)]
        for lstm in cast("list[nn.LSTM]", self.decoder.upper):
            weight_input, weight_state, *biases = lstm.all_weights[0]
            self.lstms.append(self._lstm(weight_input, weight_state, biases[0] + biases[1]))

    def _lstm(self, weight_input: Tensor, weight_state: Tensor, bias: Tensor) -> _StepLSTM:
        gates = self.prepare(torch.cat([weight_input, weight_state], dim=1), bias)
        return _StepLSTM(gates, weight_state.new_zeros(self.order.rows, weight_state.size(1)), self.fixed)

    def compute(self, tokens: Tensor, order: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return features, (R, f), and attention, (R, S) or None, for one token per row, (R,)."""
        decoder, (first, *upper) = self.decoder, self.lstms

        g_and_h = first.join(decoder.embedding.step(tokens, self.position), order)
        conditional_input, a = self.attention.attend(self.by_sentence(g_and_h))
        h = first.step(g_and_h, conditional_input.flatten(0, 1))
        for lstm in upper:
            h = lstm.step(lstm.join(decoder.dropout(h), order))
        return decoder.dropout(self.to_embedding(h)), a.flatten(0, 1) if decoder.wants_attention else None

    def keep(self, kept: KeptSentences) -> None:
        """Drop all sentences except ``kept``."""
        super().keep(kept)
        self.attention.keep(kept)


class ConditionalInput:
    """The contribution of attention to the gates, with both projections applied to the source once per batch.

    The scores are ``d·z = h·(W_dᵀ z) + b_d·z + g·z`` for ``d = W_d h + b_d + g``.  The contribution to the gates is
    ``W_c Σ a_j v_j = Σ a_j (W_c v_j)``.  Therefore ``W_dᵀ z``, ``b_d·z`` and ``W_c v_j`` are computed once.

    Args:
        lstm: LSTM with attention.
        source: encoder output, one entry per sentence.
    """

    def __init__(self, lstm: AttentiveLSTM, source: Source) -> None:
        z = source.keys.transpose(1, 2)
        # z above W_dᵀ z, (B, f + H, S), so that one product with concatenated g and h gives the scores.
        self.keys = torch.cat([z, torch.matmul(lstm.query.weight.t(), z)], dim=1)
        self.bias = source.bias + torch.matmul(source.keys, lstm.query.bias).unsqueeze(1)  # (B, 1, S)
        self.values = lstm.conditional_input(source.values)  # (B, S, 4H)

    def keep(self, kept: KeptSentences) -> None:
        """Drop all sentences except ``kept``."""
        self.keys, self.bias, self.values = map(kept.of, (self.keys, self.bias, self.values))

    def attend(self, g_and_h: Tensor) -> tuple[Tensor, Tensor]:
        """Return W_c c, (B, k, 4H), and attention a, (B, k, S), for concatenated g and h, (B, k, f + H)."""
        a = softmax(torch.baddbmm(self.bias, g_and_h, self.keys))
        return torch.bmm(a, self.values), a


class _StepLSTM:
    """The state of one LSTM, (R, H), initially zero, and its step, which needs one matrix product."""

    def __init__(self, gates: Callable[[Tensor], Tensor], zeros: Tensor, fixed: bool) -> None:
        self.gates = gates
        self.h, self.cell = zeros, torch.zeros_like(zeros)
        self.fixed = fixed

    def join(self, x: Tensor, order: Tensor | None) -> Tensor:
        """Re-order the state, and return inputs, (R, width), concatenated with hidden states: (R, width + H)."""
        if order is not None:
            update_state(self, h=reorder_rows(self.h, order), cell=reorder_rows(self.cell, order))
        return torch.cat([x, self.h], dim=1)

    def step(self, joined: Tensor, gates: Tensor | None = None) -> Tensor:
        """Compute the next hidden states, (R, H).

        Args:
            joined: result of `join`.
            gates: numbers to add to the gates' pre-activations, (R, 4H), or None.
        """
        own = self.gates(joined)
        h, cell = lstm_cell(own if gates is None else own.add_(gates), self.cell)
        update_state(self, h=h, cell=cell)
        return self.h


def lstm_cell(gates: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the equations of an LSTM (Hochreiter & Schmidhuber 1997) with forget gates.

    Args:
        gates: pre-activations of input gate, forget gate, candidate and output gate, (rows, 4H).  Their activations
            overwrite this tensor.
        cell: previous cell, (rows, H).

    Returns:
        Hidden state and cell, each (rows, H).
    """
    i, f, candidate, o = gates.chunk(4, dim=-1)
    cell = torch.addcmul(f.sigmoid_() * cell, i.sigmoid_(), candidate.tanh_())
    return o.sigmoid_() * cell.tanh(), cell
