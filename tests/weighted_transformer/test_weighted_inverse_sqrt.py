"""The two learning rates of the paper's section 4.1, compared with numbers calculated by hand."""

from __future__ import annotations

import pytest
import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.optim.adam import FairseqAdam
from omegaconf import OmegaConf

from fairseq_plugins.weighted_transformer.branches import SIMPLEX
from fairseq_plugins.weighted_transformer.config import SimplexAdamConfig, WeightedInverseSqrtConfig
from fairseq_plugins.weighted_transformer.training import FairseqSimplexAdam, WeightedInverseSqrt


def schedule(
    optimizer_class: type = FairseqSimplexAdam, dim: int | None = 256, layers: int | str | None = 4, **options: object
) -> WeightedInverseSqrt:
    adam = OmegaConf.structured(SimplexAdamConfig)
    OmegaConf.update(adam, "lr", [1.0])
    OmegaConf.update(adam, "tpu", False)
    network, branch = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    branch.param_group = SIMPLEX
    cfg = OmegaConf.create({"model": {"encoder_embed_dim": dim, "encoder_layers": layers}})
    cfg.lr_scheduler = OmegaConf.structured(WeightedInverseSqrtConfig(**options))
    return WeightedInverseSqrt(cfg.lr_scheduler, optimizer_class(adam, [network, branch]))


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
