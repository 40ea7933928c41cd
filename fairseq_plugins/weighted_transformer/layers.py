"""Layers of the Weighted Transformer (Ahmed et al. 2017, section 3, figure 1), and their attention.

The paper does not say which parts of a layer are branched.  Here, an encoder layer is one branched block of
self-attention and feed-forward network.  A decoder layer consists of the Transformer's self-attention, and a branched
block of attention to the source and feed-forward network.  A model with 6 encoder layers, 6 decoder layers and 8 heads
then has 192 weights κ and α, the number in the paper.

B sentences, T queries or target positions, S keys, h heads of width v = d/h, d model width.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_plugins.common.dropout import Dropout
from fairseq_plugins.common.linear import Linear
from fairseq_plugins.common.options import Options
from fairseq_plugins.common.source import Source, softmax
from fairseq_plugins.weighted_transformer.branches import BranchedBlock, xavier_


class EncoderLayer(nn.Module):
    """An encoder layer: self-attention and a branched block.

    Args:
        cfg: resolved options of the model.
    """

    def __init__(self, cfg: Options) -> None:
        super().__init__()
        self.attention = AttentionHeads(cfg.encoder_embed_dim, cfg.encoder_attention_heads, cfg.attention_dropout)
        self.branches = _branches(cfg, "encoder", type(self).__name__)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Compute the layer: (B, S, d) -> (B, S, d).

        Args:
            x: input, (B, S, d).
            bias: bias of attention scores, (B, 1, 1, S): minus infinity at padding, zero elsewhere.
        """
        return self.branches(x, self.attention(x, x, bias))


class DecoderLayer(nn.Module):
    """A decoder layer: the Transformer's causal self-attention, attention to the source, and a branched block.

    Args:
        cfg: resolved options of the model.
    """

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
        """Compute the layer.

        Args:
            x: input, (B, T, d).
            source: encoder output, (B, S, d).
            seen: bias of self-attention scores, (B, 1, T, T); None for causal attention.

        Returns:
            Output of the layer, and the input of attention to the source, from which attention can be reported.  Both
            have the shape (B, T, d).
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
    """Concatenated attention heads: ``head_i = softmax(Q W^Q_i (K W^K_i)ᵀ / √v) V W^V_i``.

    Args:
        dim: d.
        heads: h, which must divide d.
        dropout: dropout probability on attention weights.
    """

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = Dropout(dropout, module_name=type(self).__name__)
        # Initial weights are fairseq's.  One matrix for keys and values saves a product.
        self.query = xavier_(Linear(dim, dim), gain=math.sqrt(0.5))
        self.key_value = Linear(dim, 2 * dim)
        for weight in self.key_value.weight.chunk(2):
            nn.init.xavier_uniform_(weight, gain=math.sqrt(0.5))
        nn.init.zeros_(self.key_value.bias)

    def forward(self, x: Tensor, source: Tensor, bias: Tensor | None = None, causal: bool = False) -> Tensor:
        """Attend to ``source``.

        Args:
            x: input of the queries, (B, T, d).
            source: input of keys and values, (B, S, d).
            bias: bias of the scores, which can be broadcast to (B, h, T, S).
            causal: whether position t attends to positions up to t only.

        Returns:
            Concatenated heads, (B, T, d).
        """
        keys, values = self.project(source)
        q = split_heads(self.query(x), self.heads)
        if self.dropout.rate == 0 or x.device.type != "cpu":
            p = self.dropout.rate
            return join_heads(F.scaled_dot_product_attention(q, keys, values, bias, dropout_p=p, is_causal=causal))
        # On a CPU, torch's attention uses torch's slow dropout, and takes twice the time in bfloat16.
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
    """Return attention weights, (B, h, T, S); their softmax is computed in at least float32.

    Args:
        q: queries, (B, h, T, v).
        keys: keys as columns, (B, h, v, S).
        bias: bias of the scores, which can be broadcast to (B, h, T, S).
    """
    scores = attention_scores(q, keys)
    return softmax(scores if bias is None else scores + bias)


def attention_scores(q: Tensor, keys: Tensor) -> Tensor:
    """Return the scores ``q · k / √v``, (B, h, T, S); for the arguments see `attention_weights`."""
    return (q * q.size(-1) ** -0.5) @ keys


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Return a view of the heads: (B, T, d) -> (B, h, T, v)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """Concatenate heads: (B, h, T, v) -> (B, T, d)."""
    return x.transpose(1, 2).flatten(2)
