"""The branches of the Weighted Transformer behind its attention heads (Ahmed et al. 2017, section 3).

M branches, one for each head; d model width, v = d/M width of a head, F inner width of a branch's network, N tokens.

    h̄_i = κ_i head_i W^O_i                              (equation 6)
    out = Σ_i α_i FFN_i(h̄_i),  FFN(x) = max(0, x W_1 + b_1) W_2 + b_2      (equation 7)

Nothing non-linear stands between W^O_i and W_1, so their product is a v x F matrix that is formed once and not applied
token by token: the branches need about 60 % of the multiplications that the equations, or a Transformer's layer, spell
out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from fairseq.modules import FairseqDropout
from torch import Tensor, nn

from fairseq_plugins.nn.block_diagonal import block_diagonal_linear
from fairseq_plugins.nn.simplex import SimplexVector
from fairseq_plugins.nn.softmax import softmax

__all__ = ["BranchedFeedForward", "FoldedWeights"]


class FoldedWeights(NamedTuple):
    """κ, W^O and W_1 as one map, and α in W_2."""

    first: Tensor  # (M, v, F)
    first_bias: Tensor  # (M·F,)
    second: Tensor  # (d, M·F), or (d, F) where the branches share their network
    second_bias: Tensor | None  # (d,); None in front of a gate, which weighs it for each token


class BranchedFeedForward(nn.Module):
    """Heads of attention to the output of a block.

    The paper writes one FFN, and says of its sizes only that the parameters stay as many as the Transformer's.  Two
    readings keep them so: each branch has a network of its own with d_ff/M units ("split"), or all share one of d_ff
    ("shared").

    Args:
        dim: d.
        ffn_dim: d_ff, units of all branches together (split) or of each (shared).
        branches: M, which must divide d and for split also d_ff.
        shared: the second reading.
        mode, constraint, rescale: of κ and α, see `SimplexVector`.
        gating_topk: instead of α, a trained gate picks so many branches for each token (section 4.5).
        relu_dropout: dropout between the two layers of the networks; the paper has none.
        owner: class name that `--retain-dropout-modules` knows this dropout by.
    """

    def __init__(
        self,
        dim: int,
        ffn_dim: int,
        branches: int,
        *,
        shared: bool,
        mode: str,
        constraint: str,
        rescale: bool,
        gating_topk: int | None,
        relu_dropout: float,
        owner: str,
    ) -> None:
        super().__init__()
        self.branches = branches
        self.shared = shared
        networks, inner = (1, ffn_dim) if shared else (branches, ffn_dim // branches)
        self.head_out = nn.Parameter(torch.empty(branches, dim // branches, dim))  # W^O_i
        self.w1 = nn.Parameter(torch.empty(networks, dim, inner))
        self.b1 = nn.Parameter(torch.zeros(networks, inner))
        self.w2 = nn.Parameter(torch.empty(networks, inner, dim))
        self.b2 = nn.Parameter(torch.zeros(networks, dim))
        for stack in (self.head_out, self.w1, self.w2):
            for matrix in stack:
                nn.init.xavier_uniform_(matrix)
        self.kappa = SimplexVector(branches, mode, constraint, rescale)
        self.alpha = SimplexVector(branches, mode, constraint, rescale) if gating_topk is None else None
        self.gate = None if gating_topk is None else Gate(dim, branches, gating_topk, rescale)
        self.relu_dropout = FairseqDropout(relu_dropout, module_name=owner)

    def plain(self, heads: Tensor, x: Tensor) -> Tensor:
        """Equations 6 and 7 as they are written; `forward` computes the same.

        Args:
            heads: (..., d), head after head.
            x: what the block started from, (..., d); only a gate looks at it.
        """
        kappa = self.kappa()
        weights = self.alpha() if self.alpha is not None else self.gate(x)  # type: ignore[misc]
        out = torch.zeros_like(x)
        for i, head in enumerate(heads.chunk(self.branches, dim=-1)):
            network = 0 if self.shared else i
            h = kappa[i] * (head @ self.head_out[i])
            inner = self.relu_dropout(F.relu(h @ self.w1[network] + self.b1[network]))
            out = out + weights[..., i : i + 1] * (inner @ self.w2[network] + self.b2[network])
        return out

    def fold(self) -> FoldedWeights:
        """The weights as `forward` multiplies with them; differentiable."""
        head_out = self.kappa().view(-1, 1, 1) * self.head_out
        first = head_out @ self.w1[0] if self.shared else torch.bmm(head_out, self.w1)
        first_bias = self.b1.expand(self.branches, -1).flatten()
        if self.alpha is None:
            return FoldedWeights(first, first_bias, self.w2.flatten(0, 1).t(), None)
        alpha = self.alpha().unsqueeze(1)
        if self.shared:
            return FoldedWeights(first, first_bias, self.w2[0].t(), self.b2[0] * alpha.sum())
        w2 = (alpha.unsqueeze(1) * self.w2).flatten(0, 1)
        return FoldedWeights(first, first_bias, w2.t(), (alpha * self.b2).sum(dim=0))

    def forward(self, heads: Tensor, x: Tensor) -> Tensor:
        """Heads to output, (..., d), through folded weights.

        Args:
            heads: (..., d), head after head.
            x: what the block started from, (..., d); only a gate looks at it.
        """
        folded = self.fold()
        inner = block_diagonal_linear(heads.flatten(0, -2), folded.first, folded.first_bias)
        return self.finish(inner, x, partial(F.linear, weight=folded.second, bias=folded.second_bias))

    def finish(self, inner: Tensor, x: Tensor, second: Callable[[Tensor], Tensor]) -> Tensor:
        """From the inner units before their ReLU to the output.

        Args:
            inner: (N, M·F), overwritten.
            x: what the block started from, (..., d).
            second: the map of `FoldedWeights.second`.
        """
        inner = self.relu_dropout(F.relu_(inner))
        bias = None
        if self.gate is not None:
            weights = self.gate(x).flatten(0, -2)  # (N, M)
            bias = weights @ self.b2.expand(self.branches, -1)
            inner = (inner.unflatten(1, (self.branches, -1)) * weights.unsqueeze(2)).flatten(1)
        if self.shared:
            inner = inner.unflatten(1, (self.branches, -1))
            inner = inner.sum(dim=1) if self.alpha is None else torch.einsum("nmf,m->nf", inner, self.alpha())
        out = second(inner)
        return (out if bias is None else out + bias).view_as(x)


class Gate(nn.Module):
    """Weights of the branches that depend on the token, all but the k largest zero (section 4.5; Shazeer et al. 2017).

    Args:
        dim: d.
        branches: M.
        topk: k.
        rescale: whether the weights of the k are of mean one, and not of sum one.
    """

    def __init__(self, dim: int, branches: int, topk: int, rescale: bool) -> None:
        super().__init__()
        self.topk = topk
        self.factor = topk if rescale else 1
        self.projection = nn.Linear(dim, branches, bias=False)
        nn.init.xavier_uniform_(self.projection.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., M)."""
        scores = self.projection(x)
        kept, indices = scores.topk(self.topk, dim=-1)
        weights = softmax(kept)
        return torch.zeros_like(scores).scatter(-1, indices, weights * self.factor)
