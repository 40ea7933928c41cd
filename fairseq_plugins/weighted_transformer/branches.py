"""The branches of a Weighted Transformer layer (Ahmed et al. 2017, section 3), and their weights on the simplex.

Symbols: M is the number of branches, with one head each.  N is the number of tokens.  The model has width d, and a head
has width v = d/M.  All feed-forward networks together have inner width d_ff, and the network of one branch has inner
width F = d_ff/M.  The input of the layer is x.

    h̄_i = κ_i head_i W^O_i                                                            (equation 6)
    FFN_i(z) = max(0, z W_1i + b_1i) W_2i
    u = LayerNorm(x + Σ_i h̄_i + b^O)
    y = LayerNorm(u + Σ_i α_i FFN_i(x + h̄_i) + b_2)                                   (equation 7)

The paper keeps residual connections but does not say where they are.  These equations are this project's reading
(docs/weighted_transformer.md): x is added to h̄_i in each branch and to the sum of all h̄_i, and u is added to the
weighted sum of all FFN_i.

There is no non-linearity between W^O_i and W_1i, so their product, a v x F matrix, is computed once for all tokens.
This is called folding.  An encoder layer then needs four per cent more multiplications than an encoder layer of the
Transformer (d = 512, d_ff = 2048, M = 8).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_plugins.common.source import softmax
from fairseq_plugins.common.weight_norm import Linear
from fairseq_plugins.cpu.dropout_and_loss import Dropout
from fairseq_plugins.cpu.linear import add_block_diagonal, linear
from fairseq_plugins.cpu.packing import BatchWeights, cached

# Values of a parameter's attribute `param_group`.  SIMPLEX: the optimizer projects the parameter onto the simplex.
# SOFTMAX: the softmax of the parameter is on the simplex.  fairseq copies the attribute `param_group` to the float32
# copy of a half-precision parameter.
SIMPLEX = "branch_simplex"
SOFTMAX = "branch_softmax"


class BranchedBlock(nn.Module):
    """The branched output projection and feed-forward network of a layer.

    The block has the matrices of a Transformer layer: W^O in ``out``, W_1 in ``first`` and W_2 in ``second``.  Each
    branch owns some columns of W^O, rows of W_1 and columns of W_2.  These are torch's matrices, (outputs, inputs); the
    equations above have their transposes.

    Args:
        dim: model width d.
        ffn_dim: inner width d_ff.
        branches: number M of branches, which must divide d and d_ff.
        mode, constraint: arguments of `SimplexVector` for κ and α.
        gating_topk: number of branches that a gate selects per token (section 4.5), or None to use α without a gate.
        dropout: dropout probability before residual connections.
        relu_dropout: dropout probability inside the feed-forward networks; the paper does not use it.
        owner: class of the layer, by which ``--retain-dropout-modules`` selects the dropout of the block.
    """

    batch_weights: BatchWeights | None = None  # weights of the current batch, set by `with_batch_weights`

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
        # Initial weights of fairseq's Transformer: Xavier for W^O, uniform up to ±d^-½ for W_1 and ±d_ff^-½ for W_2.
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
        """Compute the layer by equations 6 and 7, without folding; `forward` computes the same function faster."""
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
        """Return the folded weights that `forward` reads, with gradients."""
        out, first = cached(self.batch_weights, fold_kappa, self.out.weight, self.first.weight, self.kappa())
        second = self.second.weight
        if self.alpha is not None:
            (second,) = cached(self.batch_weights, fold_alpha, second, self.alpha())
        return FoldedWeights(out, first, second)

    def forward(self, x: Tensor, heads: Tensor) -> Tensor:
        """Return the output of the layer, (..., d), for its input, (..., d), and the concatenated heads, (..., d)."""
        folded = self.fold()
        # Flatten x, not the product.  If a view of the product were overwritten in place, the backward pass would copy
        # the gradient of the view.
        inner = add_block_diagonal(self.first(x.flatten(0, -2)), heads.flatten(0, -2), folded.first)
        attended = linear(heads, folded.out, self.out.bias, self.batch_weights)
        second = partial(linear, weight=folded.second, bias=self.second.bias, batch_weights=self.batch_weights)
        return self.finish(x, attended, inner, second)

    def finish(self, x: Tensor, attended: Tensor, inner: Tensor, second: Callable[[Tensor], Tensor]) -> Tensor:
        """Compute the second part of `forward`; incremental decoding also calls this method.

        Args:
            x: input of the layer, (..., d).
            attended: Σ h̄_i plus the bias of ``out``, (..., d).
            inner: inner units of all feed-forward networks before ReLU, (N, d_ff); overwritten.
            second: linear map with the weight `FoldedWeights.second` and the bias b_2.
        """
        u = self.attention_norm(x + self.dropout(attended))
        inner = self.relu_dropout(F.relu_(inner))
        if self.gate is not None:
            weights = self.gate(x).flatten(0, -2).unsqueeze(2)
            inner = (inner.unflatten(1, (self.branches, -1)) * weights).flatten(1)
        return self.norm(u + self.dropout(second(inner).view_as(x)))


class FoldedWeights(NamedTuple):
    """The folded weights of a block.

    Attributes:
        out: κ_i W^O_i for all branches i, (d, d).
        first: κ_i W^O_i W_1i for each branch i, (M, v, F).
        second: α_i W_2i for all branches i, or W_2 itself if there is a gate, (d, M·F).
    """

    out: Tensor
    first: Tensor
    second: Tensor


def fold_kappa(out: Tensor, first: Tensor, kappa: Tensor) -> tuple[Tensor, Tensor]:
    """Return `FoldedWeights.out` and `FoldedWeights.first`; ``out`` is W^O, (d, d), and ``first`` is W_1, (d_ff, d)."""
    M = len(kappa)
    out = out * kappa.repeat_interleave(out.size(1) // M)
    return out, torch.bmm(out.t().unflatten(0, (M, -1)), first.unflatten(0, (M, -1)).transpose(1, 2))


def fold_alpha(second: Tensor, alpha: Tensor) -> tuple[Tensor]:
    """Return a tuple with one element, `FoldedWeights.second`; the argument ``second`` is W_2, (d, d_ff)."""
    return (second * alpha.repeat_interleave(second.size(1) // len(alpha)),)


class Gate(nn.Module):
    """Branch weights that depend on the token; all except the k largest are zero (section 4.5; Shazeer et al. 2017).

    The paper gives no formula.  Here, a linear map computes a score for each of the M branches, and the weights are k
    times the softmax of the k largest scores.
    """

    def __init__(self, dim: int, branches: int, topk: int) -> None:
        super().__init__()
        self.topk = topk
        self.projection = Linear(dim, branches, bias=False)
        nn.init.xavier_uniform_(self.projection.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the branch weights of each token, (..., d) -> (..., M)."""
        scores = F.linear(x, self.projection.weight)  # not in int8: rounding could change the k largest scores
        kept, indices = scores.topk(self.topk, dim=-1)
        return torch.zeros_like(scores).scatter(-1, indices, softmax(kept) * self.topk)


def xavier_(linear: Linear, gain: float = 1.0) -> Linear:
    """Set the weight to Xavier's uniform initialisation and the bias to zero, as fairseq's Transformer does."""
    nn.init.xavier_uniform_(linear.weight, gain=gain)
    nn.init.zeros_(linear.bias)
    return linear


class SimplexVector(nn.Module):
    """M branch weights with mean one: a point on the simplex (M numbers, each at least 0, with sum 1), multiplied by M.

    In the paper, κ and α are points on the simplex, so their mean is 1/M.  A block multiplies the outputs of its
    branches by κ and by α.  Without the factor M, the block's initial output would be a few hundredths of the output of
    a Transformer's block.  W^O and W_2 could include the factor M, so the model can represent the same functions with
    and without the factor M.

    Args:
        size: number M of weights.
        mode: either ``learned``, or one of three modes for comparison (table 3), where ``uniform`` and ``random``
            weights are fixed, and ``resampled`` weights are random for each training batch and uniform in inference.
        constraint: either ``simplex``, if the optimizer projects the weights onto the simplex, or ``softmax``, if the
            parameters are logits of a softmax.
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
        """Refuse branch weights, (M,), of a checkpoint that was trained with another ``--branch-constraint``."""
        if self.softmax and _lies_on_simplex(weight):
            raise ValueError("--branch-constraint softmax: the checkpoint was trained with simplex; give simplex")
        # Logits are initialised to logarithms of numbers below 1, which are negative.
        if not self.softmax and weight.sum() <= 0:
            raise ValueError("--branch-constraint simplex: the checkpoint was trained with softmax; give softmax")


def project_onto_simplex(x: Tensor) -> Tensor:
    """Return the point on the simplex that is closest to x, (M,), in Euclidean distance (Duchi et al. 2008)."""
    ordered = x.sort(descending=True).values
    counts = torch.arange(1, len(x) + 1, device=x.device, dtype=x.dtype)
    # For each j, the amount to subtract from every number so that the j largest numbers sum to 1.
    losses = (ordered.cumsum(0) - 1) / counts
    kept = (ordered > losses).sum()
    return (x - losses.gather(0, (kept - 1).view(1))).clamp(min=0)


def random_point(size: int) -> Tensor:
    """Draw a point uniformly from the simplex, (size,), by normalising exponentially distributed numbers.

    For size 8, the median ratio of the largest number to the smallest number is about thirty.
    """
    x = torch.empty(size).exponential_()
    return x / x.sum()


def near_uniform_point(size: int) -> Tensor:
    """Draw initial weights, (size,): a point on the simplex whose numbers differ at most by a factor of three.

    The initial weights in the paper's figure 3 are similarly close to each other.  A branch whose weight starts near
    zero hardly learns.
    """
    x = torch.empty(size).uniform_(0.5, 1.5)
    return x / x.sum()


def check_simplex(model: nn.Module) -> None:
    """Refuse a model whose κ or α are not on the simplex; optimizers that do not project them cause this."""
    points = [module.point() for module in model.modules() if isinstance(module, SimplexVector)]
    if points and not bool(torch.stack([_lies_on_simplex(point) for point in points]).all()):
        raise ValueError(
            "kappa and alpha are not on the simplex: train with --optimizer simplex_adam, which projects them, or with "
            "--branch-constraint softmax"
        )


def _lies_on_simplex(point: Tensor) -> Tensor:
    """Return, as a scalar, whether a vector lies on the simplex up to the rounding errors of half precision."""
    return (point.sum() - 1).abs() + (-point).clamp(min=0).sum() < 0.01
