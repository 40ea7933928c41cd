"""The optimizer, the two learning rates of section 4.1, and the logged statistics of κ and α."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import metrics
from fairseq.optim.adam import Adam, FairseqAdam
from omegaconf import OmegaConf
from torch import nn

from fairseq_plugins.weighted_transformer.branches import SIMPLEX, SOFTMAX, SimplexVector, project_onto_simplex
from fairseq_plugins.weighted_transformer.config import SimplexAdamConfig, WeightedInverseSqrtConfig
from fairseq_plugins.weighted_transformer.training import (
    FairseqSimplexAdam,
    WeightedInverseSqrt,
    WeightedLabelSmoothedCrossEntropy,
    branch_statistics,
)

TARGET = torch.tensor([0.60, 0.35, 0.05, 0.0])


def parameter(values: torch.Tensor, group: str | None = SIMPLEX) -> torch.nn.Parameter:
    made = torch.nn.Parameter(values.clone())
    if group is not None:
        made.param_group = group
    return made


def optimizer(*parameters: torch.nn.Parameter, lr: float = 0.01, kind: type = FairseqSimplexAdam, **options: object):
    cfg = OmegaConf.structured(SimplexAdamConfig)
    OmegaConf.update(cfg, "lr", [lr])
    for name, value in options.items():
        OmegaConf.update(cfg, name, value)
    OmegaConf.update(cfg, "tpu", False)
    return kind(cfg, parameters)


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


def schedule(
    optimizer_class: type = FairseqSimplexAdam, dim: int | None = 256, layers: int | str | None = 4, **options: object
) -> WeightedInverseSqrt:
    made = optimizer(parameter(torch.zeros(2), None), parameter(torch.zeros(2)), kind=optimizer_class)
    cfg = OmegaConf.create({"model": {"encoder_embed_dim": dim, "encoder_layers": layers}})
    cfg.lr_scheduler = OmegaConf.structured(WeightedInverseSqrtConfig(**options))
    return WeightedInverseSqrt(cfg.lr_scheduler, made)


def rates(made: WeightedInverseSqrt, update: int) -> tuple[float, float]:
    """Return the rates of the network and of κ and α at the given update, counted from one."""
    made.step_update(update - 1)
    network, branches = (group["lr"] for group in made.optimizer.param_groups)
    return network, branches


@pytest.mark.parametrize(
    ("update", "network", "branches"),
    [
        (1, 4000**-1.5 / 16, 400**-1.5 / 8),
        (400, 400 * 4000**-1.5 / 16, 1 / 20 / 8),
        (4000, 4000**-0.5 / 16, 4000**-0.5 / 8),
        (10000, 0.01 / 16, 0.01 / 8),
    ],
)
def test_rates(update: int, network: float, branches: float) -> None:
    assert rates(schedule(), update) == pytest.approx((network, branches), rel=1e-9)


def test_warm_ups_and_scales_are_options() -> None:
    made = schedule(warmup_updates=100, branch_warmup_updates=25, lr_scale=2.0, branch_lr_scale=0.5)
    assert rates(made, 50) == pytest.approx((2 * 50 * 100**-1.5 / 16, 0.5 * 50**-0.5 / 8), rel=1e-9)
    assert rates(schedule(warmup_updates=1, branch_warmup_updates=1), 4) == pytest.approx((0.5 / 16, 0.5 / 8), rel=1e-9)


def test_the_sizes_of_the_default_architecture() -> None:
    """With hydra, the configuration does not contain the default sizes."""
    made = schedule(dim=None, layers=None)
    assert rates(made, 10000) == pytest.approx((512**-0.5 / 100, (512 / 6) ** -0.5 / 100), rel=1e-9)


def test_other_optimizers_and_models_are_refused() -> None:
    with pytest.raises(ValueError, match="--optimizer simplex_adam"):
        schedule(FairseqAdam)
    layers = "[(16, 3)]"
    with pytest.raises(ValueError, match="--encoder-layers"):
        schedule(layers=layers)
    words = ["data", "--arch", "fconv", "--encoder-layers", layers, "--lr-scheduler", "weighted_inverse_sqrt"]
    args = options.parse_args_and_arch(options.get_training_parser(), words)
    assert convert_namespace_to_omegaconf(args).lr_scheduler.encoder_layers == layers


LOSSES = {"loss": torch.tensor(8.0), "nll_loss": torch.tensor(6.0), "ntokens": 4, "nsentences": 1, "sample_size": 4}


def block(kappa: list[float], alpha: list[float]) -> nn.Module:
    made = nn.ModuleDict()
    for name, point in (("kappa", kappa), ("alpha", alpha)):
        made[name] = SimplexVector(len(point), "learned", "simplex")
        made[name].weight.data.copy_(torch.tensor(point))
    return made


def test_statistics() -> None:
    """Blocks have four or two branches, uniform or one-hot κ; entropies are in bits, and 1000 stands for infinity."""
    model = nn.ModuleList([block([0.25] * 4, [0.4, 0.2, 0.2, 0.2]), block([1.0, 0.0], [0.5, 0.5])])
    found = {name: float(value) for name, value in branch_statistics(model).items()}
    assert found["kappa_entropy"] == pytest.approx((2 + 0) / 2)
    assert found["kappa_ratio"] == pytest.approx((1 + 1000) / 2)
    assert found["alpha_entropy"] == pytest.approx((1.921928 + 1) / 2)
    assert found["alpha_ratio"] == pytest.approx((2 + 1) / 2)


def logs() -> list[dict[str, object]]:
    first = {"kappa_entropy": torch.tensor(1.0), "alpha_ratio": torch.tensor(2.0), "forwards": 1}
    second = {"kappa_entropy": torch.tensor(4.0), "alpha_ratio": torch.tensor(8.0), "forwards": 2}  # two ranks
    return [{**LOSSES, **first}, {**LOSSES, **second}]


def test_statistics_are_of_training(build, sentences, task) -> None:
    """Validation logs no statistics, because weights do not change between its forward passes."""
    source = sentences([5, 3])
    sample = {"net_input": {"src_tokens": source, "src_lengths": None, "prev_output_tokens": source}}
    sample |= {"target": source, "ntokens": 8}
    model = build("weighted_transformer_tiny")
    criterion = WeightedLabelSmoothedCrossEntropy(task, sentence_avg=False, label_smoothing=0.1)
    seen = [set(criterion(model.train(mode), sample)[2]) for mode in (False, True)]
    assert seen[0] == {"loss", "nll_loss", "ntokens", "nsentences", "sample_size"}
    assert {"forwards", "kappa_entropy", "kappa_ratio", "alpha_entropy", "alpha_ratio"} <= seen[1]


def test_the_mean_over_forward_passes_is_shown() -> None:
    with metrics.aggregate(new_root=True) as shown:
        WeightedLabelSmoothedCrossEntropy.reduce_metrics(logs())
    values = shown.get_smoothed_values()
    assert float(values["kappa_entropy"]) == 1.667
    assert float(values["alpha_ratio"]) == 3.333
    assert set(values) == {"loss", "nll_loss", "ppl", "kappa_entropy", "alpha_ratio"}
    with metrics.aggregate(new_root=True) as shown:
        for log in logs():  # two updates
            WeightedLabelSmoothedCrossEntropy.reduce_metrics([log])
    assert float(shown.get_smoothed_values()["alpha_ratio"]) == (2 + 8 / 2) / 2
