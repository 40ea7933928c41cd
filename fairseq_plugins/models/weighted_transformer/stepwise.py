"""Decoding the Weighted Transformer one token at a time.

R rows (hypotheses), k of them for each of B sentences; S source positions, h heads of width v, d model width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from fairseq_plugins.models.incremental import ROOM, StepwiseDecoding
from fairseq_plugins.nn.attention import join_heads, split_heads
from fairseq_plugins.nn.block_diagonal import add_block_diagonal
from fairseq_plugins.nn.decoder_state import Ancestry, Kept, Past
from fairseq_plugins.nn.source import Source
from fairseq_plugins.nn.step_attention import Sight, attend_step, bags
from fairseq_plugins.nn.step_linear import step_linear

if TYPE_CHECKING:
    from fairseq_plugins.models.weighted_transformer.decoder import WeightedTransformerDecoder
    from fairseq_plugins.models.weighted_transformer.layers import DecoderLayer

__all__ = ["WeightedTransformerDecoding"]

_FEWEST_IN_BAGS = 16  # rows; for fewer, matrix products take less time (measured, 2 cores of an EPYC of family 25)


class WeightedTransformerDecoding(StepwiseDecoding):
    """The decoding of one batch.

    Args: as of `StepwiseDecoding`.
    """

    @torch.no_grad()
    def __init__(
        self, decoder: WeightedTransformerDecoder, source: Source, beam: int, room: int | None, words: Tensor | None
    ) -> None:
        super().__init__(decoder, source, beam, room, words)
        rows = self.order.rows
        self.room: int = ROOM if room is None else room
        self.ancestry = Ancestry(len(source.keys), beam, self.room, source.keys.device, self.fixed)
        modules = cast("list[DecoderLayer]", decoder.layers)
        self.heads = modules[0].self_attention.heads
        self.layers = [_Layer(module, source, rows, beam, self.room) for module in modules]

    def step(self, tokens: Tensor, order: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """One token per row, (R,), to features (R, d) and the last layer's attention (R, S)."""
        beam = tokens.numel() // len(self.source.keys)
        places = self.ancestry.step(order, beam, self.position)
        past, to_source = self._sights(beam)

        x = self.by_sentence(self.decoder.embedding.step(tokens, self.position))
        for layer in self.layers:
            x, query = layer.step(x, places, past, to_source)
        attention = None
        if self.decoder.wants_attention:
            attention = to_source.weights(query, layer.source_keys).mean(dim=1).flatten(0, 1)
        return x.flatten(0, 1), attention

    def _sights(self, beam: int) -> tuple[Sight, Sight]:
        """What the rows of this step look at, of the steps so far and of the source."""
        sentences, words, _ = self.source.keys.shape
        source_bias = self.source.bias.unsqueeze(1)
        # Attending to what has not been filled costs less than steps of several shapes only where these are compiled.
        steps = self.room if self.fixed else self.steps
        seen = steps * self.order.beam
        if self.fixed or self.position.device.type != "cpu" or sentences * beam < _FEWEST_IN_BAGS:
            return Sight(seen, self.ancestry.bias(steps, self.source.keys.dtype)), Sight(words, source_bias)
        ancestors = self.ancestry.ancestors(steps)
        everywhere = torch.arange(words).expand(sentences, beam, words)
        return (
            Sight(seen, places=ancestors.unsqueeze(1), bags=bags(ancestors, self.heads, self.room * self.order.beam)),
            Sight(words, source_bias, bags=bags(everywhere, self.heads, words)),
        )

    def keep(self, kept: Kept) -> None:
        """Go on with these sentences only."""
        super().keep(kept)
        for layer in self.layers:
            layer.keep(kept)

    def grow(self, steps: int) -> None:
        """Make room for so many more steps."""
        self.room += steps
        self.ancestry.grow(steps)
        for layer in self.layers:
            layer.past.grow(steps * self.order.beam)


class _Layer:
    """One layer at decoding time: its state, and its weights as steps want them."""

    def __init__(self, module: DecoderLayer, source: Source, rows: int, beam: int, room: int) -> None:
        self.module = module
        own, other, out = module.self_attention, module.source_attention, module.self_attention_out
        self.query_key_value = step_linear(
            torch.cat([own.query.weight, own.key_value.weight]), torch.cat([own.query.bias, own.key_value.bias]), rows
        )
        self.self_attention_out = step_linear(out.weight, out.bias, rows)
        self.source_query = step_linear(other.query.weight, other.query.bias, rows)
        keys, values = other.project(source.keys)
        self.source_keys = keys.transpose(2, 3).contiguous()  # as columns, (B, h, v, S)
        self.past = Past(self.source_keys, room * beam)

        branches = module.branches
        folded = branches.fold()
        self.out = step_linear(folded.out, branches.out.bias, rows)
        self.first = step_linear(branches.first.weight, branches.first.bias, rows)
        self.second = step_linear(folded.second, branches.second.bias, rows)
        # The first map of a branch's own head can go to the values, since averaging them is linear too: once per
        # sentence, and then averages of S values take the place of products with v rows.
        moves = beam > 1 and source.keys.size(1) < folded.first.size(1)
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
        out = self.self_attention_out(join_heads(attend_step(q, keys, values, past, module.self_attention.dropout)))
        x = module.self_attention_norm(x + module.dropout(out))

        q = split_heads(self.source_query(x), heads)
        attended = attend_step(q, self.source_keys, self.source_values, source, module.source_attention.dropout)
        heads_out, own = (join_heads(part) for part in attended.tensor_split([q.size(-1)], dim=-1))
        inner = self.first(x.flatten(0, 1))
        if self.own_first is None:
            inner += own.flatten(0, 1)
        else:
            inner = add_block_diagonal(inner, heads_out.flatten(0, 1), self.own_first)
        return module.branches.finish(x, self.out(heads_out), inner, self.second), q

    def keep(self, kept: Kept) -> None:
        """Go on with these sentences only."""
        self.past.keep(kept)
        self.source_keys, self.source_values = kept.of(self.source_keys), kept.of(self.source_values)
