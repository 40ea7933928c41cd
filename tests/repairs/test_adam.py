"""Adam in one pass, compared with fairseq's own, in parameters, moments and checkpoints."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fairseq.optim.adam import Adam
from torch import Tensor

from fairseq_plugins.repairs.training import is_plain
from tests.operators import Operators

SHAPES = ((5, 7), (3,), (2, 3, 4), ())
UPDATES = 30
# The last options have an epsilon as large as the root of the squared gradients' mean.
OPTIONS = [
    {"betas": (0.9, 0.999)},
    {"betas": (0.9, 0.98), "weight_decay": 0.1},
    {"betas": (0.0, 0.5), "eps": 0.5, "weight_decay": 0.01},
]


class PlainAdam(Adam):
    """fairseq's original Adam."""

    step = inspect.unwrap(Adam.step)


@pytest.fixture(autouse=True)
def fused() -> Iterator[Operators]:
    with Operators() as operators:
        yield operators


def optimizer(kind: type[Adam], **options: Any) -> Adam:
    """Return an optimizer of two groups with different rates."""
    torch.manual_seed(1)
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    groups = [{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:]}]
    return kind(groups, lr=0.01, **options)


def parameters(adam: Adam) -> list[torch.nn.Parameter]:
    return [each for group in adam.param_groups for each in group["params"]]


def train(adam: Adam, updates: range) -> list[Tensor]:
    """Train with gradients that depend only on the update; the last parameter has a gradient in every other update."""
    for update in updates:
        torch.manual_seed(100 + update)
        for each in parameters(adam):
            each.grad = torch.randn(each.shape) * 10 ** torch.randint(-4, 2, ()).item()
        if update % 2:
            parameters(adam)[-1].grad = None
        adam.step()
    state = adam.state
    moments = [state[each][name] for each in parameters(adam) for name in ("exp_avg", "exp_avg_sq")]
    return [*(each.detach() for each in parameters(adam)), *moments]


@pytest.mark.parametrize("options", OPTIONS)
def test_it_equals_fairseqs_adam(options: dict[str, Any], fused: Operators) -> None:
    ours, theirs = optimizer(Adam, **options), optimizer(PlainAdam, **options)
    torch.testing.assert_close(train(ours, range(UPDATES)), train(theirs, range(UPDATES)), rtol=1e-5, atol=1e-6)
    assert fused.count("aten._fused_adamw_") >= UPDATES
    steps = [[adam.state[each]["step"] for each in parameters(adam)] for adam in (ours, theirs)]
    assert steps[0] == steps[1] == [UPDATES, UPDATES, UPDATES, UPDATES // 2]


@pytest.mark.parametrize(("first", "second"), [(Adam, PlainAdam), (PlainAdam, Adam), (Adam, Adam)])
def test_checkpoints_are_exchangeable(first: type[Adam], second: type[Adam]) -> None:
    """Either optimizer may resume the other's training; resuming its own is bit-equal."""
    begun = optimizer(first, **OPTIONS[1])
    train(begun, range(10))
    resumed = optimizer(second, **OPTIONS[1])
    for ours, theirs in zip(parameters(resumed), parameters(begun), strict=True):
        ours.data.copy_(theirs.data)
    resumed.load_state_dict(copy.deepcopy(begun.state_dict()))
    found, expected = train(resumed, range(10, 20)), train(begun, range(10, 20))
    bound = {"rtol": 0, "atol": 0} if first is second else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(found, expected, **bound)
    assert resumed.state_dict()["state"].keys() == begun.state_dict()["state"].keys()
    for ours, theirs in zip(resumed.state_dict()["state"].values(), begun.state_dict()["state"].values(), strict=True):
        assert {name: type(value) for name, value in ours.items()} == {n: type(value) for n, value in theirs.items()}


@pytest.mark.parametrize("case", ["bfloat16", "amsgrad", "gradient in another order"])
def test_cases_for_the_original_step_of_fairseq(case: str, fused: Operators) -> None:
    results = []
    for kind in (Adam, PlainAdam):
        torch.manual_seed(1)
        parameter = torch.nn.Parameter(torch.randn(4, 6, dtype=torch.bfloat16 if case == "bfloat16" else torch.float32))
        adam = kind([parameter], lr=0.1, amsgrad=case == "amsgrad")
        for _ in range(5):
            grad = torch.randn_like(parameter)
            parameter.grad = torch.randn(6, 4).t() if "order" in case else grad
            adam.step()
        results.append(parameter)
    assert torch.equal(*results)
    assert not fused.count("aten._fused_adamw_")


def test_all_gradients_of_our_models_suit_the_fused_step(
    architecture: str, build: Any, sentences: Any, device: torch.device
) -> None:
    """A single gradient in another memory layout would make the whole update slower."""
    if device.type != "cpu":
        pytest.skip("the fused step is for CPUs")
    model = build(architecture).train()
    source, target = sentences([5, 3], left_pad=True), sentences([4, 6])
    model(source, torch.tensor([5, 3]), target)[0].logsumexp(dim=-1).sum().backward()
    trained = {name: each for name, each in model.named_parameters() if each.grad is not None}
    assert trained
    assert [name for name, each in trained.items() if not is_plain(each)] == []
