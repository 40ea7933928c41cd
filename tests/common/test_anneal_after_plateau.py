"""The learning-rate schedule of ConvS2S section 4.2."""

from __future__ import annotations

import pytest
import torch
from fairseq.dataclass.initialize import add_defaults
from fairseq.optim import build_optimizer
from fairseq.optim.lr_scheduler import build_lr_scheduler
from fairseq.optim.nag import FairseqNAG
from omegaconf import OmegaConf

from fairseq_plugins.common.anneal_after_plateau import AnnealAfterPlateau, AnnealAfterPlateauConfig


def schedule(maximize: bool = False, lr: tuple[float, ...] = (0.25,), **options: float) -> AnnealAfterPlateau:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = FairseqNAG(OmegaConf.create({"lr": list(lr), "momentum": 0.99, "weight_decay": 0.0}), [parameter])
    cfg = OmegaConf.structured(AnnealAfterPlateauConfig)  # the default divides "by an order of magnitude"
    for name, value in {"lr": list(lr), **options}.items():
        OmegaConf.update(cfg, name, value)
    OmegaConf.update(cfg, "maximize_best_checkpoint_metric", maximize)
    return AnnealAfterPlateau(cfg, optimizer)


def test_divides_after_every_epoch_once_validation_has_not_improved() -> None:
    scheduler = schedule()
    assert scheduler.optimizer.get_lr() == 0.25
    # The fourth epoch is the first without improvement; the rate keeps falling although the fifth epoch improves.
    losses = [9.0, 8.0, 7.0, 7.0, 6.0, 5.0]
    rates = [scheduler.step(epoch, loss) for epoch, loss in enumerate(losses, start=1)]
    assert rates == pytest.approx([0.25, 0.25, 0.25, 0.025, 0.0025, 0.00025])
    assert scheduler.optimizer.get_lr() == pytest.approx(0.00025)


@pytest.mark.parametrize("larger_is_better", [False, True])
def test_hydra_gives_the_rate_and_the_metric_in_other_groups(larger_is_better: bool) -> None:
    cfg = OmegaConf.create(
        {
            "optimization": {"lr": [0.5]},
            "checkpoint": {"maximize_best_checkpoint_metric": larger_is_better},
            "optimizer": {"_name": "nag"},
            "lr_scheduler": {"_name": "anneal_after_plateau"},
        }
    )
    add_defaults(cfg)
    optimizer = build_optimizer(cfg.optimizer, [torch.nn.Parameter(torch.zeros(1))])
    scheduler = build_lr_scheduler(cfg.lr_scheduler, optimizer)
    assert [scheduler.step(1, 7.0), scheduler.step(2, 8.0)] == pytest.approx([0.5, 0.5 if larger_is_better else 0.05])


def run_epoch(scheduler: AnnealAfterPlateau, epoch: int, loss: float | None) -> float:
    scheduler.step_begin_epoch(epoch)
    return scheduler.step(epoch, loss)


def test_an_epoch_without_validation_neither_starts_nor_stops_the_fall() -> None:
    """With --validate-interval 2, the rate falls "after each epoch" once perplexity has stopped improving."""
    scheduler = schedule()
    losses = [None, 9.0, None, 9.5, None, 8.0, None]
    rates = [run_epoch(scheduler, epoch, loss) for epoch, loss in enumerate(losses, start=1)]
    assert rates == pytest.approx([0.25, 0.25, 0.25, 0.025, 0.0025, 0.00025, 0.000025])


def test_resumes() -> None:
    straight, first = schedule(), schedule()
    losses = [9.0, 8.0, 8.5, 7.0, 7.5]
    expected = [straight.step(epoch, loss) for epoch, loss in enumerate(losses)]
    rates = [first.step(epoch, loss) for epoch, loss in enumerate(losses[:3])]
    resumed = schedule()
    resumed.load_state_dict(first.state_dict())
    assert resumed.step_update(100) == resumed.optimizer.get_lr() == pytest.approx(rates[-1])
    assert rates + [resumed.step(epoch, loss) for epoch, loss in enumerate(losses[3:])] == pytest.approx(expected)


def test_another_rate_for_a_resume_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """A second resume warns, too; old checkpoints do not record their first rate, so they cause no warning."""
    first, same, other, third, old = schedule(), schedule(), schedule(lr=(0.01,)), schedule(lr=(0.01,)), schedule()
    run_epoch(first, 1, 9.0)
    run_epoch(first, 2, 9.5)
    same.load_state_dict(first.state_dict())
    old.load_state_dict({"lr": 0.1, "best": 9.0, "annealing": True})
    assert not caplog.records
    other.load_state_dict(same.state_dict())
    third.load_state_dict(other.state_dict())
    assert len(caplog.records) == 2
    assert all(record.message.startswith("--lr 0.01: ") and "0.025" in record.message for record in caplog.records)
    assert third.lr == third.optimizer.get_lr() == 0.025


@pytest.mark.parametrize("within", [False, True], ids=["between epochs", "within an epoch"])
def test_resumes_without_validation(within: bool) -> None:
    """fairseq's calls for the resumed epoch do not end the epoch, but its late call for the epoch before does."""
    straight, resumed = schedule(), schedule()
    for epoch, loss in enumerate([9.0, 9.5, None], start=1):
        run_epoch(straight, epoch, loss)
    run_epoch(resumed, 9, 9.0)  # forgotten after loading
    resumed.step_begin_epoch(10)
    resumed.load_state_dict(straight.state_dict())
    epoch = 4 if within else 5
    for _ in range(2):
        assert resumed.step(epoch, None) == pytest.approx(0.0025)
    expected = run_epoch(straight, 4, None)
    assert (run_epoch(resumed, 4, None) if within else resumed.step(4, None)) == expected == pytest.approx(0.00025)
    assert run_epoch(resumed, 5, None) == run_epoch(straight, 5, None)


def test_the_state_of_another_schedule_is_refused() -> None:
    """The states of fairseq's schedules `fixed` and `inverse_sqrt` are refused."""
    for state in ({"lr": 0.1}, {"best": None}):
        with pytest.raises(ValueError, match="--reset-lr-scheduler"):
            schedule().load_state_dict(state)


def test_takes_one_rate() -> None:
    with pytest.raises(ValueError, match="--lr-scheduler"):
        schedule(lr=(0.25, 0.1))
