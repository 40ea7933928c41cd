"""Incremental decoding of the Weighted Transformer.

B sentences, k rows (hypotheses) per sentence, R = B·k rows, S source positions, h heads of width v, d model width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_plugins.common.decoding import KeptSentences, StepwiseDecoding, reorder_rows, update_state
from fairseq_plugins.cpu.block_diagonal import add_block_diagonal
from fairseq_plugins.cpu.packing import with_packing
from fairseq_plugins.weighted_transformer.layers import DecoderLayer, attention_weights, join_heads, split_heads

if TYPE_CHECKING:
    from fairseq_plugins.weighted_transformer.model import WeightedTransformerDecoder

_NO_ROW = -1  # marks steps that have not been made


class WeightedTransformerDecoding(StepwiseDecoding):
    """The decode-time state of the Weighted Transformer for one batch."""

    decoder: WeightedTransformerDecoder

    def set_up(self) -> None:
        """Fold weights, project the source to keys and values, and allocate memory for the steps' keys and values."""
        keys = self.source.keys
        self.ancestry = Ancestry(len(keys), self.order.beam, self.capacity, keys.device, self.fixed)
        self.layers = [_Layer(self, module) for module in cast("list[DecoderLayer]", self.decoder.layers)]

    def compute(self, tokens: Tensor, order: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return features, (R, d), and the last layer's attention, (R, S) or None, for one token per row, (R,)."""
        beam = tokens.numel() // len(self.source.keys)
        places = self.ancestry.step(order, beam, self.position)
        # With a fixed state, all steps must have the same shapes: attend to the whole memory, and mask unused places.
        past = self.ancestry.bias(self.capacity if self.fixed else self.steps, self.source.keys.dtype)
        source = self.source.bias.unsqueeze(1)

        x = self.by_sentence(self.decoder.embedding.step(tokens, self.position))
        for layer in self.layers:
            x, query = layer.step(x, places, past, source)
        attention = None
        if self.decoder.wants_attention:
            attention = attention_weights(query, layer.source_keys, source).mean(dim=1).flatten(0, 1)
        return x.flatten(0, 1), attention

    def keep(self, kept: KeptSentences) -> None:
        """Drop all sentences except ``kept``."""
        super().keep(kept)
        for layer in self.layers:
            layer.keep(kept)

    def grow(self, steps: int) -> None:
        """Allocate memory for more steps."""
        super().grow(steps)
        self.ancestry.grow(steps)
        for layer in self.layers:
            layer.past.grow(steps * self.order.beam)


class _Layer:
    """The state and the prepared weights of one layer."""

    def __init__(self, decoding: WeightedTransformerDecoding, module: DecoderLayer) -> None:
        self.module = module
        prepare, keys, beam = decoding.prepare, decoding.source.keys, decoding.order.beam
        own, other, out = module.self_attention, module.source_attention, module.self_attention_out
        self.query_key_value = prepare(
            torch.cat([own.query.weight, own.key_value.weight]), torch.cat([own.query.bias, own.key_value.bias])
        )
        self.self_attention_out = prepare(out.weight, out.bias)
        self.source_query = prepare(other.query.weight, other.query.bias)
        keys, values = with_packing(other, decoding.packing).project(keys)
        self.source_keys = keys.transpose(2, 3).contiguous()  # as columns, (B, h, v, S)
        self.past = Past(self.source_keys, decoding.capacity * beam)

        branches = with_packing(module.branches, decoding.packing)
        folded = branches.fold()
        self.out = prepare(folded.out, branches.out.bias)
        self.first = prepare(branches.first.weight, branches.first.bias)
        self.second = prepare(folded.second, branches.second.bias)
        # A branch multiplies an average of source values by its matrix `folded.first`.  Instead, the values can be
        # multiplied once per sentence.  Averages of wider values then replace a product for each row in each step.
        moves = beam > 1 and keys.size(2) < folded.first.size(1)
        self.source_values = torch.cat([values, values @ folded.first], dim=-1) if moves else values.contiguous()
        self.own_first = None if moves else folded.first

    def step(self, x: Tensor, places: Tensor, past: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
        """Compute `DecoderLayer.forward` for one step; the second dimension is hypotheses, not time.

        Args:
            x: input, (B, k, d).
            places: places of this step's keys, see `Ancestry.step`.
            past: bias of self-attention scores, (B, 1, k, P), for the first P places.
            source: bias of the scores of attention to the source, (B, 1, 1, S).

        Returns:
            Output of the layer, (B, k, d), and queries to the source, (B, h, k, v), for reporting attention.
        """
        module, heads = self.module, self.module.self_attention.heads
        q, k, v = (split_heads(part, heads) for part in self.query_key_value(x).chunk(3, dim=-1))
        keys, values = self.past.put(k, v, places)
        seen = past.size(3)
        weights = module.self_attention.dropout(attention_weights(q, keys.narrow(3, 0, seen), past))
        out = self.self_attention_out(join_heads(weights @ values.narrow(2, 0, seen)))
        x = module.self_attention_norm(x + module.dropout(out))

        q = split_heads(self.source_query(x), heads)
        weights = module.source_attention.dropout(attention_weights(q, self.source_keys, source))
        attended = weights @ self.source_values
        heads_out, own = (join_heads(part) for part in attended.tensor_split([q.size(-1)], dim=-1))
        inner = self.first(x.flatten(0, 1))
        if self.own_first is None:
            inner += own.flatten(0, 1)
        else:
            inner = add_block_diagonal(inner, heads_out.flatten(0, 1), self.own_first)
        return module.branches.finish(x, self.out(heads_out), inner, self.second), q

    def keep(self, kept: KeptSentences) -> None:
        """Drop all sentences except ``kept``."""
        self.past.keep(kept)
        self.source_keys, self.source_values = kept.of(self.source_keys), kept.of(self.source_values)


class Ancestry:
    """A table of the ancestors of each row: which of the k hypotheses of its sentence the row continues, for each step.

    Keys and values of earlier steps are never moved.  Each step stores k keys and values per sentence, and a row
    attends only to the keys of its ancestors.

    Args:
        sentences: B.
        beam: k.
        capacity: number of steps to allocate memory for.
        device: device of the rows.
        fixed: whether the table keeps its memory; see `Decoding.fixed`.
    """

    def __init__(self, sentences: int, beam: int, capacity: int, device: torch.device, fixed: bool = False) -> None:
        self.fixed = fixed
        self.own = torch.arange(beam, device=device)
        self.table = torch.full((sentences, beam, capacity), _NO_ROW, device=device)

    def step(self, order: Tensor | None, beam: int, position: Tensor) -> Tensor:
        """Begin a step: re-order the table, and enter the new keys.

        Args:
            order: index of the previous row that each row continues, (R,); None if no row moved.
            beam: rows per sentence in this step.
            position: index of the step, from zero, (1,).

        Returns:
            Places of the step's keys among the k·capacity places of a sentence, (beam,).
        """
        if order is not None:
            update_state(self, table=reorder_rows(self.table.flatten(0, 1), order).view(-1, beam, self.table.size(2)))
        own = self.own.narrow(0, 0, beam)
        self.table.index_copy_(2, position, own.view(beam, 1).expand(len(self.table), -1, 1))
        return position * len(self.own) + own

    def bias(self, steps: int, dtype: torch.dtype) -> Tensor:
        """Return the bias of self-attention scores for the keys of the first ``steps`` steps, (B, 1, beam, steps·k).

        It is zero at the keys of a row's ancestors, and minus infinity at other keys and at unused places.
        """
        mask = self.table.narrow(2, 0, steps).unsqueeze(3) != self.own
        bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, float("-inf"))
        return bias.flatten(2).unsqueeze(1)

    def grow(self, steps: int) -> None:
        """Allocate memory for more steps."""
        self.table = F.pad(self.table, (0, steps), value=_NO_ROW)


class Past:
    """The keys and values of all steps so far, k per step and sentence.

    Args:
        keys: source keys as columns, (B, h, v, S), from which type, device and sizes are copied.
        places: number of keys to allocate.
    """

    def __init__(self, keys: Tensor, places: int) -> None:
        sentences, heads, width, _ = keys.shape
        # Allocate zeros: unused places have attention weight zero, but zero times an arbitrary NaN would be NaN.
        self.keys = keys.new_zeros(sentences, heads, width, places)
        self.values = keys.new_zeros(sentences, heads, places, width)

    def put(self, keys: Tensor, values: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of a step, each (B, h, k, v), at the given places, (k,).

        Returns:
            All keys as columns, (B, h, v, places), and all values, (B, h, places, v).
        """
        self.keys.index_copy_(3, places, keys.transpose(2, 3))
        self.values.index_copy_(2, places, values)
        return self.keys, self.values

    def grow(self, places: int) -> None:
        """Allocate memory for more keys."""
        self.keys, self.values = F.pad(self.keys, (0, places)), F.pad(self.values, (0, 0, 0, places))

    def keep(self, kept: KeptSentences) -> None:
        """Drop all sentences except ``kept``."""
        self.keys, self.values = kept.of(self.keys), kept.of(self.values)
