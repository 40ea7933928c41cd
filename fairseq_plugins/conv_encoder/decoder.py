"""The LSTM decoder with attention (Gehring et al. 2016, section 2).

A fused LSTM, such as cuDNN's, cannot be used, because the input of a step includes attention, which depends on the
previous state.  The loop over time computes only values that depend on the state.  Before the loop, the input's
contribution to the gates is computed for all steps in one product.  In the backward pass, the gradients of weights and
encoder output are computed after the loop, also in one product each.

B sentences, T target positions, S source positions, H units, f embedding width, V vocabulary; k hypotheses (rows) per
sentence, R = B·k.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from fairseq.data import Dictionary
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fairseq_plugins.common.decoding import StepwiseDecoding, reorder_rows, update_state
from fairseq_plugins.common.embedding import InputEmbedding
from fairseq_plugins.common.model import IncrementalDecoder
from fairseq_plugins.common.source import Source, softmax
from fairseq_plugins.common.weight_norm import Linear
from fairseq_plugins.cpu.dropout_and_loss import Dropout
from fairseq_plugins.cpu.packing import prepare_linear, with_batch_weights


class AttentiveLSTM(nn.Module):
    """An LSTM with attention: ``h_{i+1} = LSTM([g_i c_i], h_i)``, where h_0 = 0.

    The context c_i is the result of attention, whose query depends on h_i and g_i.
    """

    def __init__(self, embed_dim: int, hidden_size: int) -> None:
        super().__init__()
        self.query = Linear(hidden_size, embed_dim)  # W_d, b_d
        self.input = Linear(embed_dim, 4 * hidden_size)
        self.conditional_input = Linear(embed_dim, 4 * hidden_size, bias=False)
        self.recurrent = Linear(hidden_size, 4 * hidden_size, bias=False)

    def forward(self, g: Tensor, source: Source) -> tuple[Tensor, Tensor]:
        """Compute the states one after another.

        Step i attends to the source: ``d_i = W_d h_i + b_d + g_i``, ``a_i = softmax(d_i · keys)`` and
        ``c_i = Σ_j a_ij values_j``.

        Returns:
            States h_{i+1}, (B, T, H), for embeddings g, (B, T, f), and the attention a, (B, T, S), without gradient.
        """
        time_first = g.transpose(0, 1)
        x = self.input(time_first)
        others = (
            time_first + self.query.bias,
            source.keys,
            source.values,
            source.bias,
            torch.cat([self.recurrent.weight, self.query.weight]),
            self.conditional_input.weight,
        )
        # autocast does not convert tensors in the backward pass, so convert all tensors to the precision of x here.
        h, a = _Recurrence.apply(x, *(other.to(x.dtype) for other in others))
        return h.transpose(0, 1), a.transpose(0, 1)


class _Recurrence(torch.autograd.Function):
    """The loop over time of `AttentiveLSTM`, with a hand-written backward pass.

    Args of `apply`:
        x: contribution of g to the gates, W_g g + b, (T, B, 4H).
        q: terms of the queries that do not depend on the state, g + b_d, (T, B, f).
        keys, values: encoder output, (B, S, f) each.
        bias: bias of the scores, (B, 1, S); without gradient.
        w_h: rows of the recurrent matrix, followed by the rows of W_d, (4H + f, H).
        w_c: matrix that maps the context to the gates, (4H, f).

    Returns:
        States, (T, B, H), and attention, (T, B, S).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        bias: Tensor,
        w_h: Tensor,
        w_c: Tensor,
    ) -> tuple[Tensor, Tensor]:
        steps, batch, width = x.shape
        hidden = width // 4
        states = x.new_zeros(steps + 1, batch, hidden)  # the initial state, and the state after each step
        cells = torch.zeros_like(states)
        gates, queries, contexts = torch.empty_like(x), torch.empty_like(q), torch.empty_like(q)
        attention = x.new_empty(steps, batch, keys.size(1))
        recurrent, conditional_input = (prepare_linear(weight, None, batch) for weight in (w_h, w_c))
        columns = keys.transpose(1, 2)
        for t in range(steps):
            from_state = recurrent(states[t])
            d = torch.add(q[t], from_state[:, width:], out=queries[t])
            a = softmax(torch.baddbmm(bias, d.unsqueeze(1), columns))
            attention[t] = a.squeeze(1)
            contexts[t] = torch.bmm(a, values).squeeze(1)
            torch.add(x[t] + from_state[:, :width], conditional_input(contexts[t]), out=gates[t])
            states[t + 1], cells[t + 1] = lstm_cell(gates[t], cells[t])
        ctx.save_for_backward(gates, states, cells, queries, contexts, attention, keys, values, w_h, w_c)
        ctx.mark_non_differentiable(attention)
        return states[1:], attention

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_states: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gates, states, cells, queries, contexts, attention, keys, values, w_h, w_c = ctx.saved_tensors
        steps, batch, width = gates.shape
        to_state, to_context = (prepare_linear(weight.t().contiguous(), None, batch) for weight in (w_h, w_c))
        columns = values.transpose(1, 2)
        # Memory for the gradients of all steps.  `grads` concatenates the gradients of the gates' pre-activations and
        # of the queries.
        grads = gates.new_empty(*gates.shape[:2], width + keys.size(2))
        grad_scores, grad_contexts = torch.empty_like(attention), torch.empty_like(contexts)
        grad_h, grad_cell = torch.zeros_like(states[0]), torch.zeros_like(cells[0])
        for t in reversed(range(steps)):
            i, f, candidate, o = gates[t].chunk(4, dim=-1)
            grad_gates, grad_query = grads[t].split([width, keys.size(2)], dim=-1)
            grad_i, grad_f, grad_candidate, grad_o = grad_gates.chunk(4, dim=-1)
            squashed = cells[t + 1].tanh()
            grad_h = grad_h + grad_states[t]
            grad_cell = torch.addcmul(grad_cell, grad_h * o, 1 - squashed.square())
            torch.mul(grad_cell * candidate, i * (1 - i), out=grad_i)
            torch.mul(grad_cell * cells[t], f * (1 - f), out=grad_f)
            torch.mul(grad_cell * i, 1 - candidate.square(), out=grad_candidate)
            torch.mul(grad_h * squashed, o * (1 - o), out=grad_o)
            grad_cell = grad_cell * f

            context = grad_contexts[t] = to_context(grad_gates)
            a = attention[t]
            grad_a = torch.bmm(context.unsqueeze(1), columns).squeeze(1)
            scores = torch.mul(a, grad_a - (a * grad_a).sum(dim=1, keepdim=True), out=grad_scores[t])
            grad_query.copy_(torch.bmm(scores.unsqueeze(1), keys).squeeze(1))
            grad_h = to_state(grads[t])

        grad_x, grad_q = grads.split([width, keys.size(2)], dim=-1)
        grad_keys = torch.bmm(grad_scores.permute(1, 2, 0), queries.transpose(0, 1))
        grad_values = torch.bmm(attention.permute(1, 2, 0), grad_contexts.transpose(0, 1))
        grad_w_h = grads.flatten(0, 1).t() @ states[:-1].flatten(0, 1)
        grad_w_c = grad_x.flatten(0, 1).t() @ contexts.flatten(0, 1)
        return grad_x, grad_q, grad_keys, grad_values, None, grad_w_h, grad_w_c


def lstm_cell(gates: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """Return hidden state and cell, (rows, H) each, of an LSTM with forget gates (Hochreiter & Schmidhuber 1997).

    Args:
        gates: pre-activations of input gate, forget gate, candidate and output gate, (rows, 4H); overwritten.
        cell: previous cell, (rows, H).
    """
    i, f, candidate, o = gates.chunk(4, dim=-1)
    cell = torch.addcmul(f.sigmoid_() * cell, i.sigmoid_(), candidate.tanh_())
    return o.sigmoid_() * cell.tanh(), cell


class ConvEncoderDecoding(StepwiseDecoding):
    """The decode-time state of the LSTM decoder for one batch."""

    decoder: LSTMDecoder

    def set_up(self) -> None:
        """Prepare one matrix and the initial state for each LSTM, and project the source for attention."""
        to_embedding, attentive = self.decoder.to_embedding, self.decoder.attentive
        self.to_embedding = self.prepare(to_embedding.weight, to_embedding.bias)
        self.attention = ConditionalInput(with_batch_weights(attentive, self.batch_weights), self.source)
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

    def projected(self) -> list[ConditionalInput]:
        """Return the attention; see `StepwiseDecoding.projected`."""
        return [self.attention]


class ConditionalInput:
    """The contribution of attention to the gates; the source is multiplied by W_d and W_c once per batch.

    The scores are ``d·z = h·(W_dᵀ z) + b_d·z + g·z`` for ``d = W_d h + b_d + g``.  The contribution to the gates is
    ``W_c Σ a_j v_j = Σ a_j (W_c v_j)``.  Therefore ``W_dᵀ z``, ``b_d·z`` and ``W_c v_j`` are computed once
    per batch.

    Attributes:
        keys: z, followed by W_dᵀ z, (B, f + H, S).  One product of the concatenated g and h with the keys gives the
            scores without their bias.
        bias: bias of the scores, (B, 1, S).
        values: W_c v_j for each source position j, (B, S, 4H).
    """

    per_sentence = "keys", "bias", "values"

    def __init__(self, lstm: AttentiveLSTM, source: Source) -> None:
        z = source.keys.transpose(1, 2)
        self.keys = torch.cat([z, torch.matmul(lstm.query.weight.t(), z)], dim=1)
        self.bias = source.bias + torch.matmul(source.keys, lstm.query.bias).unsqueeze(1)
        self.values = lstm.conditional_input(source.values)

    def attend(self, g_and_h: Tensor) -> tuple[Tensor, Tensor]:
        """Return W_c c, (B, k, 4H), and attention a, (B, k, S), for concatenated g and h, (B, k, f + H)."""
        a = softmax(torch.baddbmm(self.bias, g_and_h, self.keys))
        return torch.bmm(a, self.values), a


class _StepLSTM:
    """One LSTM of the decoder: its hidden state and cell, (R, H) each, and a method that computes a step."""

    def __init__(self, gates: Callable[[Tensor], Tensor], zeros: Tensor, fixed: bool) -> None:
        self.gates = gates
        self.h, self.cell = zeros, torch.zeros_like(zeros)
        self.fixed = fixed

    def join(self, x: Tensor, order: Tensor | None) -> Tensor:
        """Re-order the state, and concatenate inputs, (R, width), and hidden states, (R, H), to (R, width + H)."""
        update_state(self, h=reorder_rows(self.h, order), cell=reorder_rows(self.cell, order))
        return torch.cat([x, self.h], dim=1)

    def step(self, joined: Tensor, gates: Tensor | None = None) -> Tensor:
        """Return the next hidden states, (R, H), for the result of `join`.

        The term ``gates``, (R, 4H), is added to the pre-activations of the gates.
        """
        own = self.gates(joined)
        h, cell = lstm_cell(own if gates is None else own.add_(gates), self.cell)
        update_state(self, h=h, cell=cell)
        return self.h


class LSTMDecoder(IncrementalDecoder):
    """A decoder of an LSTM with attention and, optionally, further LSTMs on top of it.

    Dropout is on the input of all LSTMs except the first, and on the decoder's output.
    """

    decoding_class = ConvEncoderDecoding

    def __init__(
        self, dictionary: Dictionary, embedding: InputEmbedding, hidden_size: int, layers: int, dropout: float
    ) -> None:
        super().__init__(dictionary, embedding)
        self.dropout = Dropout(dropout, module_name=type(self).__name__)
        embed_dim = embedding.words.embedding_dim
        self.attentive = AttentiveLSTM(embed_dim, hidden_size)
        self.upper = nn.ModuleList(nn.LSTM(hidden_size, hidden_size, batch_first=True) for _ in range(layers - 1))
        self.to_embedding = Linear(hidden_size, embed_dim)
        self.output_projection = Linear(embed_dim, len(dictionary))

    def attention_modules(self) -> dict[int, nn.Module]:
        """Return the attention module; see `IncrementalDecoder.attention_modules`."""
        return {1: self.attentive}

    def features(self, g: Tensor, source: Source) -> tuple[Tensor, Tensor | None]:
        """Return the features of all positions, (B, T, f), and the attention, (B, T, S) or None."""
        h, a = self.attentive(g, source)
        for lstm in self.upper:
            h, _ = lstm(self.dropout(h))
        return self.dropout(self.to_embedding(h)), a if self.wants_attention else None
