"""Decoding the Weighted Transformer one token at a time.

R rows (hypotheses), k of them for each of B sentences; S source positions, h heads of width v, d model width.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from fairseq_plugins.models.incremental import StepwiseDecoding
from fairseq_plugins.models.weighted_transformer.decoder import WeightedTransformerDecoder
from fairseq_plugins.models.weighted_transformer.layers import DecoderLayer
from fairseq_plugins.nn.attention import Sight, join_heads, split_heads
from fairseq_plugins.nn.decoder_state import Ancestry, KeptSentences, Past

__all__ = ["WeightedTransformerDecoding"]


class WeightedTransformerDecoding(StepwiseDecoding):
    """The decoding of one batch."""

    decoder: WeightedTransformerDecoder

    def set_up(self) -> None:
        """Folded weights, keys and values of the source, and memory for those of steps."""
        keys = self.source.keys
        self.ancestry = Ancestry(len(keys), self.order.beam, self.capacity, keys.device, self.fixed)
        modules = cast("list[DecoderLayer]", self.decoder.layers)
        self.heads = modules[0].self_attention.heads
        self.layers = [_Layer(self, module) for module in modules]

    def step(self, tokens: Tensor, order: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """One token per row, (R,), to features (R, d) and the last layer's attention (R, S)."""
        beam = tokens.numel() // len(self.source.keys)
        places = self.ancestry.step(order, beam, self.position)
        past, to_source = self.sights(beam)

        x = self.by_sentence(self.decoder.embedding.step(tokens, self.position))
        for layer in self.layers:
            x, query = layer.step(x, places, past, to_source)
        attention = None
        if self.decoder.wants_attention:
            attention = to_source.weights(query, layer.source_keys).mean(dim=1).flatten(0, 1)
        return x.flatten(0, 1), attention

    def sights(self, beam: int) -> tuple[Sight, Sight]:
        """What so many rows of each sentence look at in this step: the steps so far, and the source."""
        # A fixed state attends to all that it has room for, what is not filled masked: one shape, so one program.
        steps = self.capacity if self.fixed else self.steps
        past = Sight(steps * self.order.beam, self.ancestry.bias(steps, self.source.keys.dtype))
        return past, Sight(self.source.keys.size(1), self.source.bias.unsqueeze(1))

    def keep(self, kept: KeptSentences) -> None:
        """Go on with these sentences only."""
        super().keep(kept)
        for layer in self.layers:
            layer.keep(kept)

    def grow(self, steps: int) -> None:
        """Make room for so many more steps."""
        super().grow(steps)
        self.ancestry.grow(steps)
        for layer in self.layers:
            layer.past.grow(steps * self.order.beam)


class _Layer:
    """One layer at decoding time: its state, and its weights as steps want them."""

    def __init__(self, decoding: WeightedTransformerDecoding, module: DecoderLayer) -> None:
        self.module = module
        map_of, keys, beam = decoding.map_of, decoding.source.keys, decoding.order.beam
        own, other, out = module.self_attention, module.source_attention, module.self_attention_out
        self.query_key_value = map_of(
            torch.cat([own.query.weight, own.key_value.weight]), torch.cat([own.query.bias, own.key_value.bias])
        )
        self.self_attention_out = map_of(out.weight, out.bias)
        self.source_query = map_of(other.query.weight, other.query.bias)
        keys, values = other.project(keys)
        self.source_keys = keys.transpose(2, 3).contiguous()  # as columns, (B, h, v, S)
        self.past = Past(self.source_keys, decoding.capacity * beam)

        branches = module.branches
        folded = branches.fold()
        self.out = map_of(folded.out, branches.out.bias)
        self.first = map_of(branches.first.weight, branches.first.bias)
        self.second = map_of(folded.second, branches.second.bias)
        # The first map of a branch's own head can go to the values, since averaging them is linear too: once per
        # sentence, and then averages of S values take the place of products with v rows.
        moves = beam > 1 and keys.size(2) < folded.first.size(1)
        self.source_values = torch.cat([values, values @ folded.first], dim=-1) if moves else values.contiguous()
        self.own_first = None if moves else folded.first

    def step(self, x: Tensor, places: Tensor, past: Sight, source: Sight) -> tuple[Tensor, Tensor]:
        """As `DecoderLayer.forward`, with beams in the place of time: x is (B, k, d).

        Returns:
            the layer's output, and the queries to the source for reporting, (B, h, k, v).
        """
        module, heads = self.module, self.module.self_attention.heads
        q, k, v = (split_heads(part, heads) for part in self.query_key_value(x).chunk(3, dim=-1))
        keys, values = self.past.put(k, v, places)
        weights = module.self_attention.dropout(past.weights(q, keys))
        out = self.self_attention_out(join_heads(past.average(weights, values)))
        x = module.self_attention_norm(x + module.dropout(out))

        q = split_heads(self.source_query(x), heads)
        weights = module.source_attention.dropout(source.weights(q, self.source_keys))
        attended = source.average(weights, self.source_values)
        heads_out, own = (join_heads(part) for part in attended.tensor_split([q.size(-1)], dim=-1))
        inner = self.first(x.flatten(0, 1))
        if self.own_first is None:
            inner += own.flatten(0, 1)
        else:
            inner = module.branches.add_own(inner, heads_out.flatten(0, 1), self.own_first)
        return module.branches.finish(x, self.out(heads_out), inner, self.second), q

    def keep(self, kept: KeptSentences) -> None:
        """Go on with these sentences only."""
        self.past.keep(kept)
        self.source_keys, self.source_values = kept.of(self.source_keys), kept.of(self.source_values)
