"""The branches of a Weighted Transformer layer (Ahmed et al. 2017, section 3), and their weights on the simplex.

M branches, one per head; d model width, v = d/M width of a head, F = d_ff/M inner width of a branch's feed-forward
network, N tokens; x is the input of the layer.

    h̄_i = κ_i head_i W^O_i                                                            (equation 6)
    FFN_i(z) = max(0, z W_1i + b_1i) W_2i
    u = LayerNorm(x + Σ_i h̄_i)
    y = LayerNorm(u + Σ_i α_i FFN_i(x + h̄_i) + b_2)                                   (equation 7)

The paper retains residual connections without saying where.  In this reading (docs/weighted_transformer.md) each branch
has one around its head, and the sum over the branches has one around each of its two halves.

W^O_i and W_1i have no non-linearity between them, so their product, a v x F matrix, is computed once for all tokens.
The branches then add four per cent to the multiplications of a Transformer layer (d = 512, d_ff = 2048).
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
from fairseq_plugins.cpu.packing import BatchWeights, cached

# The `param_group` of a parameter that the optimizer has to keep on the simplex, and of one whose softmax is the point.
# fairseq copies this attribute to the fp32 master of a half-precision parameter.
SIMPLEX = "branch_simplex"
SOFTMAX = "branch_softmax"


class BranchedBlock(nn.Module):
    """The branched output projection and feed-forward network of a layer.

    Its matrices are those of a Transformer layer.  Rows of ``first.weight`` and columns of ``second.weight`` are
    divided among the branches.

    Args:
        dim: d.
        ffn_dim: d_ff.
        branches: M, which must divide d and d_ff.
        mode, constraint: options of κ and α, see `SimplexVector`.
        gating_topk: number of branches that a gate selects for each token, instead of α (section 4.5).
        dropout: dropout before residual connections.
        relu_dropout: dropout inside the feed-forward networks; the paper has none.
        owner: class name of these dropouts in ``--retain-dropout-modules``.

    Attributes:
        packing: packed weights of a batch, see `linear`; set by `with_packing`.
    """

    packing: BatchWeights | None = None

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
        # Initial weights of fairseq's Transformer: Xavier for W^O, uniform within d^-½ and d_ff^-½ for W_1 and W_2.
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
        """Compute the equations literally; `forward` computes the same function.

        Args:
            x: input of the layer, (..., d).
            heads: concatenated heads, (..., d).
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
        """Return the folded weights for `forward`; differentiable."""
        out, first = cached(self.packing, fold_kappa, self.out.weight, self.first.weight, self.kappa())
        second = self.second.weight
        if self.alpha is not None:
            (second,) = cached(self.packing, fold_alpha, second, self.alpha())
        return FoldedWeights(out, first, second)

    def forward(self, x: Tensor, heads: Tensor) -> Tensor:
        """Return the output of the layer, (..., d), computed with folded weights.

        Args:
            x: input of the layer, (..., d).
            heads: concatenated heads, (..., d).
        """
        folded = self.fold()
        # Flattened first: autograd would copy a view that is overwritten in place.
        inner = add_block_diagonal(self.first(x.flatten(0, -2)), heads.flatten(0, -2), folded.first)
        attended = linear(heads, folded.out, self.out.bias, self.packing)
        second = partial(linear, weight=folded.second, bias=self.second.bias, packing=self.packing)
        return self.finish(x, attended, inner, second)

    def finish(self, x: Tensor, attended: Tensor, inner: Tensor, second: Callable[[Tensor], Tensor]) -> Tensor:
        """Compute the rest of `forward`, shared with incremental decoding.

        Args:
            x: input of the layer, (..., d).
            attended: Σ h̄_i, (..., d).
            inner: inner units of all networks before ReLU, (N, d_ff); overwritten.
            second: linear map of `FoldedWeights.second`.
        """
        u = self.attention_norm(x + self.dropout(attended))
        inner = self.relu_dropout(F.relu_(inner))
        if self.gate is not None:
            weights = self.gate(x).flatten(0, -2).unsqueeze(2)
            inner = (inner.unflatten(1, (self.branches, -1)) * weights).flatten(1)
        return self.norm(u + self.dropout(second(inner).view_as(x)))


class FoldedWeights(NamedTuple):
    """Weights with κ folded into W^O, W^O into W_1, and α into W_2."""

    out: Tensor  # (d, d)
    first: Tensor  # (M, v, F), for the head of each branch
    second: Tensor  # (d, M·F); without α if there is a gate


def fold_kappa(out: Tensor, first: Tensor, kappa: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first two `FoldedWeights` for the matrices W^O, (d, d), and W_1, (d_ff, d)."""
    M = len(kappa)
    out = out * kappa.repeat_interleave(out.size(1) // M)
    return out, torch.bmm(out.t().unflatten(0, (M, -1)), first.unflatten(0, (M, -1)).transpose(1, 2))


def fold_alpha(second: Tensor, alpha: Tensor) -> tuple[Tensor]:
    """Return the third of the `FoldedWeights` for the matrix W_2, (d, d_ff)."""
    return (second * alpha.repeat_interleave(second.size(1) // len(alpha)),)


class Gate(nn.Module):
    """Token-dependent branch weights, of which only the k largest are not zero (section 4.5; Shazeer et al. 2017).

    The paper gives no formula; this is a softmax over the k largest of M linear scores, times k.

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
        """Map (..., d) -> (..., M)."""
        scores = F.linear(x, self.projection.weight)  # never in int8, because scores select branches
        kept, indices = scores.topk(self.topk, dim=-1)
        return torch.zeros_like(scores).scatter(-1, indices, softmax(kept) * self.topk)


def xavier_(linear: Linear, gain: float = 1.0) -> Linear:
    """Initialise and return a map with Xavier's uniform weight and zero bias, like fairseq's Transformer."""
    nn.init.xavier_uniform_(linear.weight, gain=gain)
    nn.init.zeros_(linear.bias)
    return linear


class SimplexVector(nn.Module):
    """M branch weights with mean one: M times a point on the simplex.

    The paper's κ and α have mean 1/M, so a block that multiplies by both starts at about 1/M² of a normal output.  The
    factor M avoids this.  W^O and W_2 can absorb it, so the model family is unchanged.

    Args:
        size: M.
        mode: ``learned``; or for comparison (table 3) ``uniform`` or ``random``, both fixed, or ``resampled``: random
            weights for each training batch, and uniform weights in inference.
        constraint: ``simplex``: the optimizer projects the weights; ``softmax``: the parameters are logits.
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
        """Return the point on the simplex, (M,)."""
        if self.mode == "resampled" and self.training:
            return random_point(len(self.weight)).to(self.weight)
        return torch.softmax(self.weight, dim=0) if self.softmax else self.weight

    def forward(self) -> Tensor:
        """Return the branch weights, (M,)."""
        return self.point() * len(self.weight)

    def check_constraint(self, weight: Tensor) -> None:
        """Refuse the weight of a checkpoint, (M,), that was trained with the other constraint.

        Raises:
            ValueError: the constraints differ.
        """
        if self.softmax and _lies_on_simplex(weight):
            raise ValueError("--branch-constraint softmax: the checkpoint was trained with simplex; give simplex")
        if not self.softmax and weight.sum() <= 0:  # logits start at logarithms of a point on the simplex
            raise ValueError("--branch-constraint simplex: the checkpoint was trained with softmax; give softmax")


def project_onto_simplex(x: Tensor) -> Tensor:
    """Return the closest point on the simplex in Euclidean distance (Duchi et al. 2008, figure 1).

    Args:
        x: real numbers, (M,).
    """
    ordered = x.sort(descending=True).values
    counts = torch.arange(1, len(x) + 1, device=x.device, dtype=x.dtype)
    # Amount subtracted from each if the j largest stay positive.
    losses = (ordered.cumsum(0) - 1) / counts
    kept = (ordered > losses).sum()
    return (x - losses.gather(0, (kept - 1).view(1))).clamp(min=0)


def random_point(size: int) -> Tensor:
    """Draw a point uniformly from the simplex, (size,), as normalised exponential variables.

    The largest number is about thirty times the smallest (median, size 8).
    """
    x = torch.empty(size).exponential_()
    return x / x.sum()


def near_uniform_point(size: int) -> Tensor:
    """Draw a point on the simplex whose numbers differ by a factor of three at most, (size,), as initial weights.

    The paper's figure 3 starts like this.  A branch that starts near zero hardly learns.
    """
    x = torch.empty(size).uniform_(0.5, 1.5)
    return x / x.sum()


def check_simplex(model: nn.Module) -> None:
    """Refuse weights off the simplex, which result from an optimizer without projection.

    Raises:
        ValueError: the weights are off the simplex; the error names options that prevent it.
    """
    points = [module.point() for module in model.modules() if isinstance(module, SimplexVector)]
    if points and not bool(torch.stack([_lies_on_simplex(point) for point in points]).all()):
        raise ValueError(
            "kappa and alpha are not on the simplex: train with --optimizer simplex_adam, which projects them, or with "
            "--branch-constraint softmax"
        )


def _lies_on_simplex(point: Tensor) -> Tensor:
    """Return whether a vector lies on the simplex, up to rounding in half precision, as a scalar."""
    return (point.sum() - 1).abs() + (-point).clamp(min=0).sum() < 0.01
