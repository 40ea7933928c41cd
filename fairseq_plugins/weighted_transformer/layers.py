"""Layers of the Weighted Transformer (Ahmed et al. 2017, section 3, figure 1), and their attention.

The paper does not say which parts of a layer are branched.  Here, the branches of an encoder layer consist of heads of
self-attention and parts of the feed-forward network.  The branches of a decoder layer consist of heads of source
attention and parts of the feed-forward network; the decoder's self-attention has no branches.  A model with 6 encoder
layers, 6 decoder layers and 8 heads then has 192 weights κ and α.  The paper gives this number for 16 heads.

The second part of the file contains incremental decoding.

B sentences, T queries or target positions, S keys, h heads of width v = d/h, d model width; k hypotheses (rows) per
sentence, R = B·k.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_plugins.common.decoding import StepwiseDecoding, reorder_rows, update_state
from fairseq_plugins.common.options import Options
from fairseq_plugins.common.source import Source, softmax
from fairseq_plugins.common.weight_norm import Linear
from fairseq_plugins.cpu.dropout_and_loss import Dropout
from fairseq_plugins.cpu.linear import add_block_diagonal
from fairseq_plugins.cpu.packing import with_batch_weights
from fairseq_plugins.weighted_transformer.branches import BranchedBlock, xavier_

if TYPE_CHECKING:
    from fairseq_plugins.weighted_transformer.model import WeightedTransformerDecoder


class EncoderLayer(nn.Module):
    """An encoder layer: self-attention and a branched block."""

    def __init__(self, cfg: Options) -> None:
        super().__init__()
        self.attention = AttentionHeads(cfg.encoder_embed_dim, cfg.encoder_attention_heads, cfg.attention_dropout)
        self.branches = _branches(cfg, "encoder", type(self).__name__)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Compute the layer, (B, S, d) -> (B, S, d), with a bias of attention scores, (B, 1, 1, S)."""
        return self.branches(x, self.attention(x, x, bias))


class DecoderLayer(nn.Module):
    """A decoder layer: the Transformer's causal self-attention, attention to the source, and a branched block."""

    def __init__(self, cfg: Options) -> None:
        super().__init__()
        dim, heads = cfg.encoder_embed_dim, cfg.decoder_attention_heads
        self.self_attention = AttentionHeads(dim, heads, cfg.attention_dropout)
        self.self_attention_out = xavier_(Linear(dim, dim))
        self.self_attention_norm = nn.LayerNorm(dim)
        self.source_attention = AttentionHeads(dim, heads, cfg.attention_dropout)
        self.branches = _branches(cfg, "decoder", type(self).__name__)
        self.dropout = Dropout(cfg.dropout, module_name=type(self).__name__)

    def forward(self, x: Tensor, source: Source, seen: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compute the layer, (B, T, d) -> (B, T, d).

        If ``seen`` is None, self-attention is causal.  Otherwise, ``seen`` is the bias of the self-attention scores.

        Returns:
            The output of the layer, and the input of source attention, from which the weights of source attention can
            be computed.
        """
        out = self.self_attention_out(self.self_attention(x, x, seen, causal=seen is None))
        x = self.self_attention_norm(x + self.dropout(out))
        heads = self.source_attention(x, source.values, source.bias.unsqueeze(1))
        return self.branches(x, heads), x


def _branches(cfg: Options, side: str, owner: str) -> BranchedBlock:
    return BranchedBlock(
        cfg.encoder_embed_dim,
        getattr(cfg, f"{side}_ffn_embed_dim"),
        getattr(cfg, f"{side}_attention_heads"),
        mode=str(cfg.branch_weights),
        constraint=str(cfg.branch_constraint),
        gating_topk=cfg.branch_gating_topk,
        dropout=cfg.dropout,
        relu_dropout=cfg.relu_dropout,
        owner=owner,
    )


class AttentionHeads(nn.Module):
    """Concatenated attention heads: ``head_i = softmax(Q W^Q_i (K W^K_i)ᵀ / √v) V W^V_i``, with dropout on weights."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = Dropout(dropout, module_name=type(self).__name__)
        # Initial weights are those of fairseq's attention.  One matrix for keys and values saves a product.
        self.query = xavier_(Linear(dim, dim), gain=math.sqrt(0.5))
        self.key_value = Linear(dim, 2 * dim)
        for weight in self.key_value.weight.chunk(2):
            nn.init.xavier_uniform_(weight, gain=math.sqrt(0.5))
        nn.init.zeros_(self.key_value.bias)

    def forward(self, x: Tensor, source: Tensor, bias: Tensor | None = None, causal: bool = False) -> Tensor:
        """Attend from x, (B, T, d), to ``source``, (B, S, d), and return the concatenated heads, (B, T, d).

        Args:
            bias: bias of the scores, which can be broadcast to (B, h, T, S).
            causal: whether position t attends only to positions up to t.
        """
        keys, values = self.project(source)
        q = split_heads(self.query(x), self.heads)
        if self.dropout.rate == 0 or x.device.type != "cpu":
            p = self.dropout.rate
            return join_heads(F.scaled_dot_product_attention(q, keys, values, bias, dropout_p=p, is_causal=causal))
        # On a CPU, torch's attention uses torch's slow dropout, and in bfloat16 takes twice the time of this code.
        if causal:
            bias = q.new_full((q.size(2), q.size(2)), -math.inf).triu_(1)
        return join_heads(self.dropout(attention_weights(q, keys.transpose(2, 3), bias)) @ values)

    def weights(self, x: Tensor, source: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the attention weights, (B, h, T, S), that `forward` computes if ``causal`` is false."""
        keys, _ = self.project(source)
        return attention_weights(split_heads(self.query(x), self.heads), keys.transpose(2, 3), bias)

    def project(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Project a source, (B, S, d), to keys and values, (B, h, S, v) each."""
        keys, values = self.key_value(source).chunk(2, dim=-1)
        return split_heads(keys, self.heads), split_heads(values, self.heads)


def attention_weights(q: Tensor, keys: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``softmax(q · k / √v + bias)``, (B, h, T, S), for queries, (B, h, T, v), and keys, (B, h, v, S)."""
    scores = (q * q.size(-1) ** -0.5) @ keys
    return softmax(scores if bias is None else scores + bias)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Return a view of the heads, (B, T, d) -> (B, h, T, v)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """Concatenate heads, (B, h, T, v) -> (B, T, d)."""
    return x.transpose(1, 2).flatten(2)


_NO_ROW = -1  # entry of the `Ancestry` table for a step that has not been made


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
        # A fixed state needs the same shapes in all steps: attend to all allocated places, and mask unused places.
        past = self.ancestry.bias(self.capacity if self.fixed else self.steps, self.source.keys.dtype)
        source = self.source.bias.unsqueeze(1)

        x = self.by_sentence(self.decoder.embedding.step(tokens, self.position))
        for layer in self.layers:
            x, query = layer.step(x, places, past, source)
        attention = None
        if self.decoder.wants_attention:
            attention = attention_weights(query, layer.source_keys, source).mean(dim=1).flatten(0, 1)
        return x.flatten(0, 1), attention

    def projected(self) -> list[_Layer]:
        """Return the layers; see `StepwiseDecoding.projected`."""
        return self.layers

    def grow(self, steps: int) -> None:
        """Allocate memory for more steps."""
        super().grow(steps)
        self.ancestry.grow(steps)
        places = steps * self.order.beam
        for layer in self.layers:
            layer.keys, layer.values = F.pad(layer.keys, (0, places)), F.pad(layer.values, (0, 0, 0, places))


class _Layer:
    """The state and the prepared weights of one layer.

    Attributes:
        keys: keys of all steps so far, k per step and sentence, as columns, (B, h, v, places).
        values: values of all steps so far, in the order of the keys, (B, h, places, v).
    """

    per_sentence = "keys", "values", "source_keys", "source_values"

    def __init__(self, decoding: WeightedTransformerDecoding, module: DecoderLayer) -> None:
        self.module = module
        prepare, beam = decoding.prepare, decoding.order.beam
        own, other, out = module.self_attention, module.source_attention, module.self_attention_out
        self.query_key_value = prepare(
            torch.cat([own.query.weight, own.key_value.weight]), torch.cat([own.query.bias, own.key_value.bias])
        )
        self.self_attention_out = prepare(out.weight, out.bias)
        self.source_query = prepare(other.query.weight, other.query.bias)
        keys, values = with_batch_weights(other, decoding.batch_weights).project(decoding.source.keys)
        self.source_keys = keys.transpose(2, 3).contiguous()  # one column per source position, (B, h, v, S)
        sentences, heads, width, _ = self.source_keys.shape
        # Allocate zeros: unused places have attention weight zero, but zero times an arbitrary NaN would be NaN.
        self.keys = keys.new_zeros(sentences, heads, width, decoding.capacity * beam)
        self.values = keys.new_zeros(sentences, heads, decoding.capacity * beam, width)

        branches = with_batch_weights(module.branches, decoding.batch_weights)
        folded = branches.fold()
        self.out = prepare(folded.out, branches.out.bias)
        self.first = prepare(branches.first.weight, branches.first.bias)
        self.second = prepare(folded.second, branches.second.bias)
        # In each step, a branch averages source values and multiplies each row's average by a matrix of `folded.first`.
        # For short sources, multiply the values by this matrix before the first step, and average the products.
        moves = beam > 1 and keys.size(2) < folded.first.size(1)
        self.source_values = torch.cat([values, values @ folded.first], dim=-1) if moves else values.contiguous()
        self.own_first = None if moves else folded.first

    def step(self, x: Tensor, places: Tensor, past: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
        """Compute `DecoderLayer.forward` for one step; the second dimension of x is hypotheses, not time.

        Args:
            x: input, (B, k, d).
            places: places of this step's keys, see `Ancestry.step`.
            past: bias of self-attention scores, (B, 1, k, P), for the keys at the first P places.
            source: bias of the scores of attention to the source, (B, 1, 1, S).

        Returns:
            Output of the layer, (B, k, d), and queries of the source attention, (B, h, k, v).  A decoder that reports
            attention computes the attention from these queries.
        """
        module, heads = self.module, self.module.self_attention.heads
        q, k, v = (split_heads(part, heads) for part in self.query_key_value(x).chunk(3, dim=-1))
        self.keys.index_copy_(3, places, k.transpose(2, 3))
        self.values.index_copy_(2, places, v)
        seen = past.size(3)
        weights = module.self_attention.dropout(attention_weights(q, self.keys.narrow(3, 0, seen), past))
        out = self.self_attention_out(join_heads(weights @ self.values.narrow(2, 0, seen)))
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


class Ancestry:
    """A table of each row's ancestors: for each earlier step, the number (0 to k - 1) of the row's ancestor.

    The ancestors of a row are the rows of earlier steps that the row continues.  Keys and values of earlier steps are
    never moved.  Each step stores k keys and values per sentence, and a row attends only to the keys of its ancestors.
    If ``fixed``, steps update the table, (B, k, capacity), in place.
    """

    def __init__(self, sentences: int, beam: int, capacity: int, device: torch.device, fixed: bool = False) -> None:
        self.fixed = fixed
        self.own = torch.arange(beam, device=device)
        self.table = torch.full((sentences, beam, capacity), _NO_ROW, device=device)

    def step(self, order: Tensor | None, beam: int, position: Tensor) -> Tensor:
        """Begin the step at ``position``, (1,): re-order the table, and add the step's entries.

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

        The bias is zero at the keys of a row's ancestors, and minus infinity at other keys and at unused places.
        """
        mask = self.table.narrow(2, 0, steps).unsqueeze(3) != self.own
        bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, float("-inf"))
        return bias.flatten(2).unsqueeze(1)

    def grow(self, steps: int) -> None:
        """Allocate memory for more steps."""
        self.table = F.pad(self.table, (0, steps), value=_NO_ROW)
