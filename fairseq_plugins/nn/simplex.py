"""Points on the probability simplex: non-negative numbers that sum to one.

The weights κ and α of the Weighted Transformer live there (Ahmed et al. 2017, section 3).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = [
    "SIMPLEX",
    "SOFTMAX",
    "SimplexVector",
    "check_simplex",
    "near_uniform_point",
    "project_onto_simplex",
    "random_point",
]

# The `param_group` of a parameter that the optimizer has to keep on the simplex, and of one whose softmax is the point.
# fairseq copies this attribute to the fp32 master of a half-precision parameter.
SIMPLEX = "branch_simplex"
SOFTMAX = "branch_softmax"


def project_onto_simplex(x: Tensor) -> Tensor:
    """The closest point of the simplex, in Euclidean distance (Duchi et al. 2008, figure 1).

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


def _lies_on_simplex(point: Tensor) -> Tensor:
    """Whether a vector does, up to rounding in half precision: a single bit."""
    return (point.sum() - 1).abs() + (-point).clamp(min=0).sum() < 0.01


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
