"""The projection, compared with its definition, and weights on the simplex."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_plugins.weighted_transformer.branches import (
    SimplexVector,
    check_simplex,
    near_uniform_point,
    project_onto_simplex,
    random_point,
)

vectors = st.lists(st.floats(-3, 3), min_size=1, max_size=9).map(lambda x: torch.tensor(x, dtype=torch.float64))


@settings(deadline=None)  # a busy machine may pause
@given(vectors, vectors)
def test_the_projection_is_the_closest_point(x: torch.Tensor, other: torch.Tensor) -> None:
    """Optimality: the vector x - p forms no acute angle with the direction from p to any other point of the simplex."""
    p = project_onto_simplex(x)
    assert float(p.min()) >= 0
    assert float(p.sum()) == pytest.approx(1, abs=1e-12)
    corners = torch.eye(len(x), dtype=torch.float64)
    assert float(((corners - p) @ (x - p)).max()) <= 1e-9


def test_random_points_are_uniform() -> None:
    """A coordinate of a uniform point of three numbers is below x with probability 1 - (1 - x)²."""
    torch.manual_seed(1)
    first = torch.stack([random_point(3)[0] for _ in range(4000)])
    for x in (0.1, 0.3, 0.6):
        assert float((first < x).float().mean()) == pytest.approx(1 - (1 - x) ** 2, abs=0.03)


def test_learning_starts_near_uniform() -> None:
    """The largest weight is less than three times the smallest, typically twice, as in the paper's figure 3."""
    torch.manual_seed(1)
    points = torch.stack([near_uniform_point(8) for _ in range(1000)])
    torch.testing.assert_close(points.sum(dim=1), torch.ones(1000))
    ratios = points.amax(dim=1) / points.amin(dim=1)
    assert float(ratios.max()) < 3
    assert 1.8 < float(ratios.median()) < 2.5
    torch.testing.assert_close(points.mean(dim=0), torch.full((8,), 1 / 8), rtol=0.05, atol=0)


@pytest.mark.parametrize("mode", ["learned", "uniform", "random", "resampled"])
@pytest.mark.parametrize("constraint", ["simplex", "softmax"])
def test_weights(mode: str, constraint: str) -> None:
    torch.manual_seed(1)
    vector = SimplexVector(5, mode, constraint).eval()
    assert float(vector().sum()) == pytest.approx(5, rel=1e-5)
    assert float(vector().min()) >= 0
    assert (float(vector().max() - vector().min()) < 1e-6) == (mode in ("uniform", "resampled"))
    assert torch.equal(vector(), vector())
    assert vector.weight.requires_grad == (mode == "learned")


@pytest.mark.parametrize("mode", ["learned", "uniform", "random"])
def test_both_constraints_start_with_the_same_weights(mode: str) -> None:
    starts = []
    for constraint in ("simplex", "softmax"):
        torch.manual_seed(1)
        starts.append(SimplexVector(5, mode, constraint)())
    torch.testing.assert_close(*starts)


def test_parameters_and_their_groups_in_the_optimizer() -> None:
    """The parameter is the point itself if the optimizer projects, and the point's logits otherwise."""
    numbers = torch.tensor([0.2, 0.3, 0.5])
    expected = {
        "simplex": ("branch_simplex", numbers),
        "softmax": ("branch_softmax", numbers.exp() / numbers.exp().sum()),
    }
    for constraint, (group, point) in expected.items():
        vector = SimplexVector(3, "learned", constraint)
        assert vector.weight.param_group == group
        vector.weight.data = numbers
        torch.testing.assert_close(vector.point(), point)


@pytest.mark.parametrize("constraint", ["simplex", "softmax"])
def test_resampled_weights_are_new_in_each_pass_of_training(constraint: str) -> None:
    vector = SimplexVector(5, "resampled", constraint).train()
    first, second = vector(), vector()
    assert not torch.equal(first, second)
    for weights in (first, second):
        assert float(weights.sum()) == pytest.approx(5, rel=1e-5)
    assert vector.half()().dtype == torch.float16


def test_leaving_the_simplex_is_noticed() -> None:
    """An optimizer without the projection leaves the simplex."""
    kappa, alpha = SimplexVector(4, "learned", "simplex"), SimplexVector(4, "learned", "simplex")
    model = torch.nn.ModuleList([kappa, alpha])
    check_simplex(model)
    for point in ([0.9, 0.5, 0.3, -0.7], [0.4, 0.4, 0.4, 0.4], [float("nan")] * 4):
        alpha.weight.data = torch.tensor(point)
        with pytest.raises(ValueError, match="--branch-constraint"):
            check_simplex(model)
