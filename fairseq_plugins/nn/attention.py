"""Scaled dot-product attention in several heads (Vaswani et al. 2017, section 3.2), up to where the heads meet.

B sentences, T queries, S positions attended to, h heads, v = d/h, width of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F
from fairseq.modules import FairseqDropout
from torch import Tensor, nn

from fairseq_plugins.nn.initialisation import xavier_
from fairseq_plugins.nn.softmax import softmax

__all__ = ["AttentionHeads", "Sight", "attention_scores", "attention_weights", "join_heads", "split_heads"]


class AttentionHeads(nn.Module):
    """``head_i = softmax(Q W^Q_i (K W^K_i)ᵀ / √v) V W^V_i``, all heads side by side.

    Args:
        dim: d.
        heads: h, which must divide d.
        dropout: on the weights of the attention.
    """

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = FairseqDropout(dropout, module_name=type(self).__name__)
        # As fairseq draws them: the three as one matrix, so that one product makes them.
        self.query = xavier_(nn.Linear(dim, dim), gain=math.sqrt(0.5))
        self.key_value = nn.Linear(dim, 2 * dim)
        for weight in self.key_value.weight.chunk(2):
            nn.init.xavier_uniform_(weight, gain=math.sqrt(0.5))
        nn.init.zeros_(self.key_value.bias)

    def forward(self, x: Tensor, source: Tensor, bias: Tensor | None = None, causal: bool = False) -> Tensor:
        """Attend to ``source``.

        Args:
            x: queries, (B, T, d).
            source: keys and values, (B, S, d).
            bias: added to the scores, broadcast to (B, h, T, S).
            causal: whether position t sees only positions up to t.

        Returns:
            (B, T, d), head after head.
        """
        keys, values = self.project(source)
        q = split_heads(self.query(x), self.heads)
        p = self.dropout.p if self.training or self.dropout.apply_during_inference else 0.0
        return join_heads(F.scaled_dot_product_attention(q, keys, values, bias, dropout_p=p, is_causal=causal))

    def weights(self, x: Tensor, source: Tensor, bias: Tensor | None = None) -> Tensor:
        """What `forward` averages with when it is not causal, (B, h, T, S)."""
        keys, _ = self.project(source)
        return attention_weights(split_heads(self.query(x), self.heads), keys.transpose(2, 3), bias)

    def project(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of what is attended to, each (B, h, S, v)."""
        keys, values = self.key_value(source).chunk(2, dim=-1)
        return split_heads(keys, self.heads), split_heads(values, self.heads)


def attention_weights(q: Tensor, keys: Tensor, bias: Tensor | None) -> Tensor:
    """The weights of attention, (B, h, T, S), computed at least in float32.

    Args:
        q: (B, h, T, v).
        keys: as columns, (B, h, v, S).
        bias: added to the scores, broadcast to (B, h, T, S).
    """
    scores = attention_scores(q, keys)
    return softmax(scores if bias is None else scores + bias)


def attention_scores(q: Tensor, keys: Tensor) -> Tensor:
    """``q · k / √v``, (B, h, T, S); the arguments are those of `attention_weights`."""
    return (q * q.size(-1) ** -0.5) @ keys


@dataclass(frozen=True)
class Sight:
    """What the few rows of each sentence look at in a decoding step.

    Attributes:
        seen: how many of the keys and values, from the first on, any row looks at.
        bias: added to the scores, broadcast to (B, h, T, seen); None for nothing.
    """

    seen: int
    bias: Tensor | None

    def weights(self, q: Tensor, keys: Tensor) -> Tensor:
        """`attention_weights` of q (B, h, T, v) and keys as columns, (B, h, v, S): (B, h, T, seen)."""
        return attention_weights(q, keys.narrow(3, 0, self.seen), self.bias)

    def average(self, weights: Tensor, values: Tensor) -> Tensor:
        """Averages of ``values`` (B, h, S, v) by these weights: (B, h, T, v).  torch's fused kernel would be slower."""
        return weights @ values.narrow(2, 0, self.seen)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, T, d) -> (B, h, T, v), without a copy."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """(B, h, T, v) -> (B, T, d)."""
    return x.transpose(1, 2).flatten(2)
