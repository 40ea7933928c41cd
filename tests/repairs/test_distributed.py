"""Several processes over gloo train like one with the same batches per update; half precision on a CPU."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fairseq import utils
from torch.distributed import TCPStore
from torch.distributed.rendezvous import rendezvous

from fairseq_plugins.repairs import training as repaired
from tests import faults
from tests.commands import ROOT
from tests.conftest import ARCHITECTURES
from tests.repairs.trainings import fork

# This user directory saves each rank's parameters whenever rank 0 saves a checkpoint.
EVERY_RANK = """
import fairseq_plugins, torch
fairseq_plugins.install()
from fairseq import checkpoint_utils
save = checkpoint_utils.save_checkpoint
def save_checkpoint(cfg, trainer, *more):
    torch.save(trainer.get_model().state_dict(), f"{cfg.save_dir}/rank{trainer.data_parallel_rank}")
    return save(cfg, trainer, *more)
checkpoint_utils.save_checkpoint = save_checkpoint
"""
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node"]


@pytest.fixture(scope="module")
def user_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plugin") / "every_rank"
    folder.mkdir()
    (folder / "__init__.py").write_text(EVERY_RANK)
    return folder


def options(data: Path, architecture: str) -> list[object]:
    """Return options without dropout; with two processes, an epoch has eleven updates."""
    words = [data, "--arch", architecture, *faults.FAMILIES[architecture].split(), *faults.COMMON, "--dropout", 0]
    if "transformer" in architecture:
        words += ["--attention-dropout", 0]
    if "adam" in faults.FAMILIES[architecture]:
        # The gradient of key biases is only rounding errors; Adam's default epsilon would make whole steps of it.
        words += ["--adam-eps", 1e-5]
    return words


def command(launcher: str, processes: int, words: list[object], save: Path) -> list[object]:
    train = ["fairseq_cli.train", *words, "--save-dir", save]
    return {
        "torchrun": [*TORCHRUN, processes, "-m", *train],
        "fairseq": [*train, "--distributed-world-size", processes],
    }[launcher]


@contextlib.contextmanager
def launched(command: list[object], save: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a training as users do, and stop it at the end of the test."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (save / "log").open("w") as log:
        words = [sys.executable, "-W", "ignore", "-m", *map(str, command)]
        process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def folders(parent: Path) -> tuple[Path, Path]:
    for name in ("single", "several"):
        (parent / name).mkdir()
    return parent / "single", parent / "several"


def assert_trained_as_one(several: Path, processes: int, expected: dict[str, torch.Tensor]) -> None:
    ranks = [torch.load(several / f"rank{rank}") for rank in range(processes)]
    assert len(list(several.glob("rank*"))) == processes
    for name, value in expected.items():
        assert all(torch.equal(rank[name], ranks[0][name]) for rank in ranks), name
        torch.testing.assert_close(ranks[0][name], value, rtol=1e-4, atol=1e-5)


CASES = [("convs2s_tiny", "torchrun", "pytorch_ddp", 2), ("weighted_transformer_tiny", "fairseq", "legacy_ddp", 2)]
SLOW_CASES = [
    (architecture, launcher, backend, processes)
    for architecture in ARCHITECTURES
    for launcher in ("torchrun", "fairseq")
    for backend, processes in (("pytorch_ddp", 2), ("pytorch_ddp", 4), ("legacy_ddp", 4))
    if (architecture, launcher, backend, processes) not in CASES
]
SLOW_CASES += [("convs2s_tiny", "fairseq", other_name, 2) for other_name in ("c10d", "no_c10d")]


@pytest.mark.parametrize(
    ("architecture", "launcher", "backend", "processes"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)],
)
def test_several_processes_train_as_one(
    architecture: str, launcher: str, backend: str, processes: int, data: Path, user_dir: Path, tmp_path: Path
) -> None:
    """Parameters are the same in all processes, and in one process with as many batches per update."""
    single, several = folders(tmp_path)
    words = [*options(data, architecture), "--max-update", 9]
    parallel = [*words, "--ddp-backend", backend, "--user-dir", user_dir]
    with launched(command(launcher, processes, parallel, several), several) as training:
        expected = faults.finish(faults.start([*words, "--update-freq", processes], single), single)
        assert training.wait(timeout=300) == 0, (several / "log").read_text()[-6000:]
    assert_trained_as_one(several, processes, expected["model"])


@pytest.mark.parametrize("missing", ["", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"])
def test_incomplete_variables_do_not_mean_torchrun(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "3")
    monkeypatch.delenv(missing, raising=False)
    assert repaired.processes_of_torchrun() == (1 if missing else 3)


def test_hydra_under_torchrun(data: Path, user_dir: Path, tmp_path: Path) -> None:
    """Until the plugin is imported, later fairseq versions see one process only, and 0.12.2 requires GPUs."""
    single, several = folders(tmp_path)
    (tmp_path / "recipe.yaml").write_text(f"""\
# @package _group_
common: {{user_dir: {user_dir}, log_format: json}}
task: {{_name: translation, data: {data}}}
model: {{_name: convs2s_tiny, dropout: 0}}
criterion: {{_name: cross_entropy}}
optimizer: {{_name: nag, momentum: 0.99}}
lr_scheduler: {{_name: anneal_after_plateau}}
dataset: {{max_tokens: 20, num_workers: 0}}
optimization: {{lr: [0.25], clip_norm: 0.1, max_update: 9}}
checkpoint: {{save_dir: {several}, no_epoch_checkpoints: true}}
distributed_training: {{distributed_backend: gloo}}
""")
    recipe = ["--config-dir", tmp_path, "--config-name", "recipe", f"hydra.run.dir={tmp_path / 'hydra'}"]
    with launched([*TORCHRUN, 2, "-m", "fairseq_cli.hydra_train", *recipe], several) as training:
        words = [*options(data, "convs2s_tiny"), "--max-update", 9, "--update-freq", 2]
        expected = faults.finish(faults.start(words, single), single)
        assert training.wait(timeout=300) == 0, (several / "log").read_text()[-6000:]
    assert_trained_as_one(several, 2, expected["model"])


def test_ranks_that_are_started_one_by_one(data: Path, user_dir: Path, tmp_path: Path) -> None:
    single, several = folders(tmp_path)
    words = [*options(data, "conv_encoder_tiny"), "--max-update", 9]
    ranks = fork([*words, "--user-dir", user_dir], several)
    expected = faults.finish(faults.start([*words, "--update-freq", 2], single), single)
    for rank in ranks:
        faults.finish(rank, several)
    assert_trained_as_one(several, 2, expected["model"])


def wait_for(path: Path) -> None:
    for _ in range(3000):
        if path.exists():
            return
        time.sleep(0.1)
    raise AssertionError(f"{path} was not written")


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_ends_the_other(killed: int, data: Path, tmp_path: Path) -> None:
    ranks = fork([*options(data, "convs2s_tiny"), "--max-update", 100_000], tmp_path)
    wait_for(tmp_path / "checkpoint_last.pt")
    ranks[killed].kill()
    other = ranks[1 - killed]
    other.join(120)
    assert other.exitcode == 1
    assert re.search(r"RuntimeError: .*gloo", (tmp_path / "log").read_text())


def test_each_start_of_torchrun_has_its_own_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun keeps the addresses of all starts, and counts starts differently on several machines."""
    kept = TCPStore("localhost", 0, is_master=True)
    variables = {"MASTER_ADDR": "localhost", "MASTER_PORT": kept.port, "RANK": 0, "WORLD_SIZE": 2}
    variables |= {"TORCHELASTIC_USE_AGENT_STORE": True, "GROUP_WORLD_SIZE": 1}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    found = []
    for start in (0, 1, 1):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(start))
        store, rank, processes = next(rendezvous(repaired.meeting_place(), rank=1, world_size=2))
        assert (rank, processes) == (1, 2)
        found.append(store.add("address", 1))
    assert found == [1, 1, 2]
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert repaired.meeting_place() == "env://"
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert repaired.meeting_place() == "env://"


def test_gradients_are_clipped_on_a_cpu_despite_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device stands for a GPU; moving a gradient to this device would raise an error."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "meta")
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.tensor([3.0, 4.0])
    assert float(utils.clip_grad_norm_(iter(parameters), 1.0)) == pytest.approx(50**0.5)
    assert torch.stack([each.grad for each in parameters]).norm() == pytest.approx(1, rel=1e-5)
    assert torch.cuda.is_available()
