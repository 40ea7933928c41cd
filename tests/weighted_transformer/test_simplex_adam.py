"""Adam with a projection: its results, its saved state, and parameters that are not projected."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from fairseq.optim.adam import Adam
from omegaconf import OmegaConf

from fairseq_plugins.weighted_transformer.branches import SIMPLEX, SOFTMAX, project_onto_simplex
from fairseq_plugins.weighted_transformer.config import SimplexAdamConfig
from fairseq_plugins.weighted_transformer.training import FairseqSimplexAdam

TARGET = torch.tensor([0.60, 0.35, 0.05, 0.0])


def parameter(values: torch.Tensor, group: str | None = SIMPLEX) -> torch.nn.Parameter:
    made = torch.nn.Parameter(values.clone())
    if group is not None:
        made.param_group = group
    return made


def optimizer(*parameters: torch.nn.Parameter, lr: float = 0.01, **options: object) -> FairseqSimplexAdam:
    cfg = OmegaConf.structured(SimplexAdamConfig)
    OmegaConf.update(cfg, "lr", [lr])
    for name, value in options.items():
        OmegaConf.update(cfg, name, value)
    OmegaConf.update(cfg, "tpu", False)
    return FairseqSimplexAdam(cfg, parameters)


def test_the_default_is_adam_and_then_the_projection() -> None:
    """Each update is fairseq's Adam and then the projection, as in sections 3 and 4.1."""
    torch.manual_seed(1)
    ours, theirs = parameter(torch.full((5,), 0.2)), parameter(torch.full((5,), 0.2))
    mine, adam = optimizer(ours, lr=0.05), Adam([theirs], lr=0.05, betas=(0.9, 0.98), eps=1e-9)
    for _ in range(20):
        ours.grad = torch.randn(5)
        theirs.grad = ours.grad.clone()
        mine.step()
        adam.step()
        theirs.data.copy_(project_onto_simplex(theirs.data))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_epsilon_is_added_to_the_root() -> None:
    """If gradients are as large as --adam-eps, the first step is half the learning rate."""
    point = parameter(torch.tensor([0.5, 0.5]))
    mine = optimizer(point, adam_eps=1e-3)
    point.grad = torch.tensor([1e-3, -1e-3])
    mine.step()
    torch.testing.assert_close(point.detach(), torch.tensor([0.495, 0.505]))


def test_the_network_gets_fairseqs_adam() -> None:
    torch.manual_seed(1)
    start = torch.randn(3, 4)
    ours = [parameter(start, group) for group in (None, SOFTMAX, "a group of another model")]
    theirs = parameter(start, None)
    mine, adam = optimizer(*ours), Adam([theirs], lr=0.01, betas=(0.9, 0.98), eps=1e-9)
    for _ in range(5):
        gradient = torch.randn(3, 4)
        for each in (*ours, theirs):
            each.grad = gradient.clone()
        mine.step()
        adam.step()
    assert all(torch.equal(each, theirs) for each in ours)


@pytest.mark.parametrize("group", [SIMPLEX, SOFTMAX])
def test_frozen_weights_do_not_move(group: str) -> None:
    """The remaining momentum does not move frozen weights, and the network is still trained."""
    frozen, network = parameter(torch.full((4,), 0.25), group), parameter(torch.zeros(4), None)
    mine = optimizer(frozen, network, freeze_branch_weights_after=3)
    states = []
    for _ in range(6):
        for each in (frozen, network):
            each.grad = torch.tensor([1.0, -1.0, 2.0, 0.5])
        mine.step()
        states.append((frozen.detach().clone(), network.detach().clone()))
    assert not torch.equal(states[1][0], states[2][0])
    assert torch.equal(states[2][0], states[5][0])
    assert not torch.equal(states[2][1], states[5][1])


def test_it_resumes_where_it_was_saved() -> None:
    """The resumed optimizer also freezes weights at the same update."""
    torch.manual_seed(1)
    gradients = torch.randn(8, 4)

    def go_on(mine: FairseqSimplexAdam, point: torch.nn.Parameter, updates: range) -> None:
        for update in updates:
            point.grad = gradients[update].clone()
            mine.step()

    options = {"freeze_branch_weights_after": 6}
    straight, stopped = parameter(torch.full((4,), 0.25)), parameter(torch.full((4,), 0.25))
    go_on(optimizer(straight, **options), straight, range(8))
    first = optimizer(stopped, **options)
    go_on(first, stopped, range(4))
    resumed = parameter(stopped.detach())
    second = optimizer(resumed, **options)
    second.load_state_dict(deepcopy(first.state_dict()), second.optimizer_config)
    go_on(second, resumed, range(4, 8))
    assert torch.equal(resumed, straight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_steps_are_not_lost_in_half_precision(dtype: torch.dtype) -> None:
    """With --memory-efficient-bf16, fairseq keeps no float32 parameters; a step here is far below the precision."""
    half, full = parameter(torch.full((4,), 0.25).to(dtype)), parameter(torch.full((4,), 0.25))
    first, second = optimizer(half, lr=1e-5), optimizer(full, lr=1e-5)
    for _ in range(2000):
        half.grad = torch.tensor([1e-4, -1e-4, 5e-5, -5e-5]).to(dtype)  # their squares underflow in float16
        full.grad = half.grad.float()
        first.step()
        second.step()
    torch.testing.assert_close(half.float(), full.detach(), rtol=0.01, atol=0.001)
    assert float(full[1]) > 0.26


def test_a_loaded_state_moves_to_the_device_of_its_parameter() -> None:
    """fairseq loads checkpoints on the CPU; the meta device stands for a GPU."""
    half = parameter(torch.full((4,), 0.25).half())
    moved = parameter(half.detach().to("meta"))
    first, second = optimizer(half), optimizer(moved)
    half.grad, moved.grad = torch.ones_like(half), torch.ones_like(moved)
    first.step()
    second.optimizer.state[moved] = deepcopy(first.optimizer.state[half])
    second.step()
    tensors = [value for value in second.optimizer.state[moved].values() if torch.is_tensor(value)]
    assert len(tensors) == 3  # two means, and the parameter in float32
    assert all(tensor.is_meta for tensor in tensors)


def test_a_shard_of_the_parameters_gets_the_same_options() -> None:
    """With --zero-sharding os, fairseq builds a second optimizer from the class and `optimizer_config`."""
    mine = optimizer(parameter(TARGET), freeze_branch_weights_after=3)
    again = type(mine.optimizer)(mine.optimizer.param_groups, **mine.optimizer_config)
    assert again.freeze_after == 3


def test_moments_are_never_in_half_precision() -> None:
    with pytest.raises(ValueError, match="--fp16-adam-stats"):
        optimizer(parameter(TARGET), fp16_adam_stats=True)


def test_a_flattened_optimizer_is_refused() -> None:
    """fairseq's error then recommends --fp16-no-flatten-grads."""
    assert not optimizer(parameter(torch.zeros(3), None)).supports_flat_params


def test_betas_are_not_evaluated() -> None:
    with pytest.raises(ValueError, match="not a literal"):
        optimizer(parameter(TARGET), adam_betas="__import__('os').getcwd()")
