"""What stands behind the attention heads of a Weighted Transformer's layer (Ahmed et al. 2017, section 3).

M branches, one for each head; d model width, v = d/M width of a head, F = d_ff/M inner width of a branch's network,
N tokens; x is what the layer started from.

    h̄_i = κ_i head_i W^O_i                                                            (equation 6)
    FFN_i(z) = max(0, z W_1i + b_1i) W_2i
    u = LayerNorm(x + Σ_i h̄_i)
    y = LayerNorm(u + Σ_i α_i FFN_i(x + h̄_i) + b_2)                                   (equation 7)

Where residual connections are is a reading of the paper, which says that they are retained: here each branch has one
around its head, and the sum over the branches has one around each of its halves.

Nothing non-linear stands between W^O_i and W_1i, so their product is a v x F matrix that is formed once for all tokens:
the branches' own inputs add four per cent to the multiplications of a Transformer's layer (d = 512, d_ff = 2048).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from fairseq.modules import FairseqDropout
from torch import Tensor, nn

from fairseq_plugins.nn.initialisation import xavier_
from fairseq_plugins.nn.simplex import SimplexVector
from fairseq_plugins.nn.softmax import softmax

__all__ = ["BranchedBlock", "FoldedWeights", "add_block_diagonal", "fold_alpha", "fold_kappa"]


class FoldedWeights(NamedTuple):
    """κ in W^O, W^O in W_1, and α in W_2."""

    out: Tensor  # (d, d)
    first: Tensor  # (M, v, F), of a branch's own head
    second: Tensor  # (d, M·F); α is not in it where a gate takes its place


def fold_kappa(out: Tensor, first: Tensor, kappa: Tensor) -> tuple[Tensor, Tensor]:
    """The first two of `FoldedWeights`, of the matrices W^O (d, d) and W_1 (d_ff, d)."""
    M = len(kappa)
    out = out * kappa.repeat_interleave(out.size(1) // M)
    return out, torch.bmm(out.t().unflatten(0, (M, -1)), first.unflatten(0, (M, -1)).transpose(1, 2))


def fold_alpha(second: Tensor, alpha: Tensor) -> tuple[Tensor]:
    """The third of `FoldedWeights`, of the matrix W_2, (d, d_ff)."""
    return (second * alpha.repeat_interleave(second.size(1) // len(alpha)),)


def add_block_diagonal(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """``y_i + x_i W_i`` for each block i of tensors that keep their M blocks side by side.

    Args:
        y: (N, M·b).
        x: (N, M·a).
        weight: (M, a, b).

    Returns:
        (N, M·b).
    """
    x, weight = x.to(y.dtype), weight.to(y.dtype)  # under autocast they may come in different precisions
    rows, by_block = (part.unflatten(1, (len(weight), -1)).transpose(0, 1) for part in (y, x))
    return torch.baddbmm(rows, by_block, weight).transpose(0, 1).flatten(1)


class BranchedBlock(nn.Module):
    """From the heads of attention to the output of a layer.

    The matrices are those of a Transformer's layer, as many and as large: rows of ``first.weight`` and columns of
    ``second.weight`` belong to a branch each.

    Args:
        dim: d.
        ffn_dim: d_ff.
        branches: M, which must divide d and d_ff.
        mode, constraint: of κ and α, see `SimplexVector`.
        gating_topk: instead of α, a trained gate picks so many branches for each token (section 4.5).
        dropout: on what is added to a residual connection.
        relu_dropout: dropout between the two layers of the networks; the paper has none.
        owner: class name that `--retain-dropout-modules` knows these dropouts by.
    """

    def __init__(
        self,
        dim: int,
        ffn_dim: int,
        branches: int,
        *,
        mode: str,
        constraint: str,
        gating_topk: int | None,
        dropout: float,
        relu_dropout: float,
        owner: str,
    ) -> None:
        super().__init__()
        self.branches = branches
        # As fairseq's Transformer draws them: W^O is Xavier's, W_1 and W_2 lie within d^-½ and d_ff^-½.
        self.out = xavier_(nn.Linear(dim, dim))
        self.first = nn.Linear(dim, ffn_dim)
        self.second = nn.Linear(ffn_dim, dim)
        self.attention_norm = nn.LayerNorm(dim)
        self.norm = nn.LayerNorm(dim)
        self.kappa = SimplexVector(branches, mode, constraint)
        self.alpha = SimplexVector(branches, mode, constraint) if gating_topk is None else None
        self.gate = None if gating_topk is None else Gate(dim, branches, gating_topk)
        self.dropout = FairseqDropout(dropout, module_name=owner)
        self.relu_dropout = FairseqDropout(relu_dropout, module_name=owner)

    def plain(self, x: Tensor, heads: Tensor) -> Tensor:
        """The equations as they are written; `forward` computes the same.

        Args:
            x: what the layer started from, (..., d).
            heads: (..., d), head after head.
        """
        M, kappa = self.branches, self.kappa()
        parts = zip(heads.chunk(M, dim=-1), self.out.weight.chunk(M, dim=1), strict=True)
        h = [kappa[i] * F.linear(head, out) for i, (head, out) in enumerate(parts)]
        u = self.attention_norm(x + self.dropout(sum(h) + self.out.bias))
        weights = self.alpha() if self.alpha is not None else self.gate(x)  # type: ignore[misc]
        y = self.second.bias
        w1, b1, w2 = self.first.weight.chunk(M), self.first.bias.chunk(M), self.second.weight.chunk(M, dim=1)
        for i in range(M):
            inner = self.relu_dropout(F.relu(F.linear(x + h[i], w1[i], b1[i])))
            y = y + weights[..., i : i + 1] * F.linear(inner, w2[i])
        return self.norm(u + self.dropout(y))

    linear: Callable[..., Tensor] = staticmethod(F.linear)
    add_own = staticmethod(add_block_diagonal)  # of each branch its own head's part of the inner units
    cached: Callable[..., Any] = staticmethod(lambda compute, *weights: compute(*weights))  # for a backend that caches

    def fold(self) -> FoldedWeights:
        """The weights as `forward` multiplies with them; differentiable."""
        out, first = self.cached(fold_kappa, self.out.weight, self.first.weight, self.kappa())
        second = self.second.weight
        if self.alpha is not None:
            (second,) = self.cached(fold_alpha, second, self.alpha())
        return FoldedWeights(out, first, second)

    def forward(self, x: Tensor, heads: Tensor) -> Tensor:
        """A layer's output, (..., d), through folded weights.

        Args:
            x: what the layer started from, (..., d).
            heads: (..., d), head after head.
        """
        folded = self.fold()
        # Two-dimensional from the start: what is overwritten should not be a view, which autograd would copy.
        inner = self.add_own(self.first(x.flatten(0, -2)), heads.flatten(0, -2), folded.first)
        attended = self.linear(heads, folded.out, self.out.bias)
        return self.finish(x, attended, inner, partial(self.linear, weight=folded.second, bias=self.second.bias))

    def finish(self, x: Tensor, attended: Tensor, inner: Tensor, second: Callable[[Tensor], Tensor]) -> Tensor:
        """The rest, from where decoding step by step has its own way of multiplying.

        Args:
            x: what the layer started from, (..., d).
            attended: Σ h̄_i, (..., d).
            inner: the networks' inner units before their ReLU, side by side, (N, d_ff); overwritten.
            second: the map of `FoldedWeights.second`.
        """
        u = self.attention_norm(x + self.dropout(attended))
        inner = self.relu_dropout(F.relu_(inner))
        if self.gate is not None:
            weights = self.gate(x).flatten(0, -2).unsqueeze(2)
            inner = (inner.unflatten(1, (self.branches, -1)) * weights).flatten(1)
        return self.norm(u + self.dropout(second(inner).view_as(x)))


class Gate(nn.Module):
    """Weights of the branches that depend on the token, all but the k largest zero (section 4.5; Shazeer et al. 2017).

    The paper gives no formula; here it is a softmax over the k largest of M linear scores, times k.

    Args:
        dim: d.
        branches: M.
        topk: k.
    """

    def __init__(self, dim: int, branches: int, topk: int) -> None:
        super().__init__()
        self.topk = topk
        self.projection = nn.Linear(dim, branches, bias=False)
        nn.init.xavier_uniform_(self.projection.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., M)."""
        scores = F.linear(x, self.projection.weight)  # never in fewer bits: it decides which branches there are
        kept, indices = scores.topk(self.topk, dim=-1)
        return torch.zeros_like(scores).scatter(-1, indices, softmax(kept) * self.topk)
