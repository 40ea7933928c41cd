"""The branches of a Weighted Transformer's layer (Ahmed et al. 2017, section 3), and their weights on the simplex.

M branches, one for each head; d model width, v = d/M width of a head, F = d_ff/M inner width of a branch's network,
N tokens; x is the input of the layer.

    h̄_i = κ_i head_i W^O_i                                                            (equation 6)
    FFN_i(z) = max(0, z W_1i + b_1i) W_2i
    u = LayerNorm(x + Σ_i h̄_i)
    y = LayerNorm(u + Σ_i α_i FFN_i(x + h̄_i) + b_2)                                   (equation 7)

The paper says that residual connections are retained, and not where they are; in this reading (docs/decisions.md) each
branch has one around its head, and the sum over the branches has one around each of its halves.

No non-linearity stands between W^O_i and W_1i, so their product is a v x F matrix that is formed once for all tokens:
the branches' own inputs add four per cent to the multiplications of a Transformer's layer (d = 512, d_ff = 2048).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_plugins.common.dropout import Dropout
from fairseq_plugins.common.linear import Linear
from fairseq_plugins.common.source import softmax
from fairseq_plugins.cpu.block_diagonal import add_block_diagonal
from fairseq_plugins.cpu.linear import linear
from fairseq_plugins.cpu.packing import BatchPacking, cached

# The `param_group` of a parameter that the optimizer has to keep on the simplex, and of one whose softmax is the point.
# fairseq copies this attribute to the fp32 master of a half-precision parameter.
SIMPLEX = "branch_simplex"
SOFTMAX = "branch_softmax"


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

    Attributes:
        packing: as of `linear`; set by `with_packing`.
    """

    packing: BatchPacking | None = None

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
        self.out = xavier_(Linear(dim, dim))
        self.first = Linear(dim, ffn_dim)
        self.second = Linear(ffn_dim, dim)
        self.attention_norm = nn.LayerNorm(dim)
        self.norm = nn.LayerNorm(dim)
        self.kappa = SimplexVector(branches, mode, constraint)
        self.alpha = SimplexVector(branches, mode, constraint) if gating_topk is None else None
        self.gate = None if gating_topk is None else Gate(dim, branches, gating_topk)
        self.dropout = Dropout(dropout, module_name=owner)
        self.relu_dropout = Dropout(relu_dropout, module_name=owner)

    def plain(self, x: Tensor, heads: Tensor) -> Tensor:
        """The equations as they are written; `forward` computes the same.

        Args:
            x: the layer's input, (..., d).
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

    def fold(self) -> FoldedWeights:
        """The weights as `forward` multiplies with them; differentiable."""
        out, first = cached(self.packing, fold_kappa, self.out.weight, self.first.weight, self.kappa())
        second = self.second.weight
        if self.alpha is not None:
            (second,) = cached(self.packing, fold_alpha, second, self.alpha())
        return FoldedWeights(out, first, second)

    def forward(self, x: Tensor, heads: Tensor) -> Tensor:
        """A layer's output, (..., d), through folded weights.

        Args:
            x: the layer's input, (..., d).
            heads: (..., d), head after head.
        """
        folded = self.fold()
        # Two-dimensional from the start: what is overwritten should not be a view, which autograd would copy.
        inner = add_block_diagonal(self.first(x.flatten(0, -2)), heads.flatten(0, -2), folded.first)
        attended = linear(heads, folded.out, self.out.bias, self.packing)
        second = partial(linear, weight=folded.second, bias=self.second.bias, packing=self.packing)
        return self.finish(x, attended, inner, second)

    def finish(self, x: Tensor, attended: Tensor, inner: Tensor, second: Callable[[Tensor], Tensor]) -> Tensor:
        """Compute the rest of `forward`, which decoding step by step shares.

        Args:
            x: the layer's input, (..., d).
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


class FoldedWeights(NamedTuple):
    """κ in W^O, W^O in W_1, and α in W_2."""

    out: Tensor  # (d, d)
    first: Tensor  # (M, v, F), of a branch's own head
    second: Tensor  # (d, M·F); α is not in it where a gate takes its place


def fold_kappa(out: Tensor, first: Tensor, kappa: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first two of `FoldedWeights`, of the matrices W^O (d, d) and W_1 (d_ff, d)."""
    M = len(kappa)
    out = out * kappa.repeat_interleave(out.size(1) // M)
    return out, torch.bmm(out.t().unflatten(0, (M, -1)), first.unflatten(0, (M, -1)).transpose(1, 2))


def fold_alpha(second: Tensor, alpha: Tensor) -> tuple[Tensor]:
    """Return the third of `FoldedWeights`, of the matrix W_2, (d, d_ff)."""
    return (second * alpha.repeat_interleave(second.size(1) // len(alpha)),)


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
        self.projection = Linear(dim, branches, bias=False)
        nn.init.xavier_uniform_(self.projection.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., M)."""
        scores = F.linear(x, self.projection.weight)  # never in int8: it chooses the branches
        kept, indices = scores.topk(self.topk, dim=-1)
        return torch.zeros_like(scores).scatter(-1, indices, softmax(kept) * self.topk)


def xavier_(linear: Linear, gain: float = 1.0) -> Linear:
    """Return the map with Xavier's uniform weight and zero bias, as fairseq's Transformer has them."""
    nn.init.xavier_uniform_(linear.weight, gain=gain)
    nn.init.zeros_(linear.bias)
    return linear


class SimplexVector(nn.Module):
    """M weights of branches, of mean one: M times a point on the simplex.

    Taken literally the paper's κ and α have mean 1/M, and a block that multiplies by both starts at some M² of a normal
    block's output; the factor M mends it, and W^O and W_2 absorb it, so that the functions are the same.

    Args:
        size: M.
        mode: ``learned``; or for comparison (Table 3) ``uniform`` or ``random``, both fixed, or ``resampled``: random
            ones drawn anew for each batch of training, and uniform ones in their place afterwards.
        constraint: ``simplex``, where the optimizer projects, or ``softmax``, where the parameters are its logits.
    """

    def __init__(self, size: int, mode: str, constraint: str) -> None:
        super().__init__()
        self.mode = mode
        self.softmax = constraint == "softmax"
        if mode == "learned":
            point = near_uniform_point(size)
        elif mode == "random":
            point = random_point(size)
        else:
            point = torch.full((size,), 1 / size)
        self.weight = nn.Parameter(point.log() if self.softmax else point, requires_grad=mode == "learned")
        self.weight.param_group = SOFTMAX if self.softmax else SIMPLEX  # type: ignore[attr-defined]

    def point(self) -> Tensor:
        """The point on the simplex, (M,)."""
        if self.mode == "resampled" and self.training:
            return random_point(len(self.weight)).to(self.weight)
        return torch.softmax(self.weight, dim=0) if self.softmax else self.weight

    def forward(self) -> Tensor:
        """The weights, (M,)."""
        return self.point() * len(self.weight)

    def check_constraint(self, weight: Tensor) -> None:
        """Refuse the weight of a checkpoint, (M,), that has been trained under the other constraint.

        Raises:
            ValueError: names both.
        """
        if self.softmax and _lies_on_simplex(weight):
            raise ValueError("the checkpoint was trained with --branch-constraint simplex, and not softmax")
        if not self.softmax and weight.sum() <= 0:  # logits begin at the logarithms of a point on it
            raise ValueError("the checkpoint was trained with --branch-constraint softmax, and not simplex")


def project_onto_simplex(x: Tensor) -> Tensor:
    """Return the closest point of the simplex, in Euclidean distance (Duchi et al. 2008, figure 1).

    Args:
        x: (M,), of any real numbers.
    """
    ordered = x.sort(descending=True).values
    counts = torch.arange(1, len(x) + 1, device=x.device, dtype=x.dtype)
    # If the j largest stay positive, this is what each of them loses.
    losses = (ordered.cumsum(0) - 1) / counts
    kept = (ordered > losses).sum()
    return (x - losses.gather(0, (kept - 1).view(1))).clamp(min=0)


def random_point(size: int) -> Tensor:
    """A point drawn uniformly from the simplex, (size,): normalised exponential variables.

    Its largest number is some thirty times its smallest (median, size 8).
    """
    x = torch.empty(size).exponential_()
    return x / x.sum()


def near_uniform_point(size: int) -> Tensor:
    """A random point whose numbers are within about a factor of two of one another, (size,), to start learning from.

    So the paper's figure 3 begins.  A branch that starts with next to nothing learns next to nothing.
    """
    x = torch.empty(size).uniform_(0.5, 1.5)
    return x / x.sum()


def check_simplex(model: nn.Module) -> None:
    """Refuse weights off the simplex, where any optimizer drives them that does not project.

    Raises:
        ValueError: names the options that would have kept them there.
    """
    points = [module.point() for module in model.modules() if isinstance(module, SimplexVector)]
    if points and not bool(torch.stack([_lies_on_simplex(point) for point in points]).all()):
        raise ValueError(
            "kappa and alpha have left the simplex: train with --optimizer simplex_adam, which projects them, or with "
            "--branch-constraint softmax"
        )


def _lies_on_simplex(point: Tensor) -> Tensor:
    """Whether a vector does, up to rounding in half precision: a single bit."""
    return (point.sum() - 1).abs() + (-point).clamp(min=0).sum() < 0.01
