"""Checkpoints are saved completely and with float32 parameters, and damaged checkpoints are named."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import re
import shutil
import signal
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import fairseq_cli.train
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.dataclass.configs import FairseqConfig
from fairseq.file_io import PathManager
from fairseq.optim import FP16Optimizer
from fairseq.optim.dynamic_loss_scaler import DynamicLossScaler

from fairseq_plugins.cli import main as cli
from fairseq_plugins.convs2s.model import ConvS2SModel
from fairseq_plugins.repairs import saving
from tests import faults
from tests.commands import USER_DIR, full_disk, run
from tests.repairs.trainings import fail, fork, options, resume, train, updates, words


def test_a_full_disk_stops_training_and_nothing_else(data: Path, save: Path) -> None:
    size = (save / "checkpoint_last.pt").stat().st_size
    message = fail(options(data, 9), save, size // 2)
    assert f"{save}/checkpoint_1_9.pt cannot be written: [Errno 27] File too large" in message
    assert updates(resume(options(data, 9), save)) == 9
    assert "checkpoint_last.pt (epoch 1 @ 6 updates)" in (save / "log").read_text()


def test_a_failed_write_or_copy_leaves_nothing(tmp_path: Path) -> None:
    path, source = tmp_path / "checkpoint_last.pt", tmp_path / "checkpoint1.pt"
    path.write_text("before")
    source.write_bytes(bytes(200_000))
    with full_disk(100_000):
        with pytest.raises(OSError, match=r"averaged\.pt cannot be written: \[Errno 27\] File too large$"):
            checkpoint_utils.torch_persistent_save({"model": torch.zeros(100_000)}, str(tmp_path / "averaged.pt"))
        with pytest.raises(OSError, match=r"checkpoint_last\.pt cannot be written: \[Errno 27\]"):
            checkpoint_utils.torch_persistent_save({"model": torch.zeros(100_000)}, str(path))
        with pytest.raises(OSError, match=r"checkpoint_last\.pt cannot be written: \[Errno 27\]"):
            PathManager.copy(str(source), str(path), overwrite=True)
        assert path.read_text() == "before"
        assert sorted(tmp_path.iterdir()) == [source, path]
        checkpoint_utils.torch_persistent_save({"model": torch.zeros(100)}, str(path))
        assert torch.equal(torch.load(path)["model"], torch.zeros(100))


def test_storage_without_rename_is_written_directly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fairseq writes to storage such as S3 through iopath."""
    stored, path = io.BytesIO(), tmp_path / "checkpoint.pt"
    monkeypatch.setattr(PathManager, "supports_rename", lambda _: False)
    monkeypatch.setattr(PathManager, "open", lambda *_: contextlib.nullcontext(stored))
    checkpoint_utils.torch_persistent_save({"a": 1}, str(path))
    stored.seek(0)
    assert torch.load(stored) == {"a": 1}
    assert not path.exists()


def test_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    """Files that are still being written, by this or another machine, stay."""
    path = tmp_path / "checkpoint_last.pt"
    killed = multiprocessing.get_context("fork").Process(target=os.getpid)
    killed.start()
    killed.join()
    writing = multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True)
    writing.start()
    here = os.uname().nodename
    writers = [f"{here}-{killed.pid}", f"{here}-{writing.pid}", f"elsewhere-{killed.pid}", f"{here}-x"]
    left = [tmp_path / f"{path.name}.{writer}.tmp" for writer in writers]
    for name in left:
        name.touch()
    checkpoint_utils.torch_persistent_save({"model": torch.zeros(1)}, str(path))
    assert sorted(tmp_path.iterdir()) == sorted([path, *left[1:]])
    writing.join(0.1)
    assert writing.is_alive()
    writing.kill()


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power failure could otherwise leave the name without the content."""
    path, synced, sync = tmp_path / "checkpoint1.pt", [], os.fsync

    def record(descriptor: int) -> None:
        synced.append((os.fstat(descriptor), path.exists()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    checkpoint_utils.torch_persistent_save({"model": torch.zeros(100)}, str(path))
    ((before, named),) = synced
    assert (before.st_ino, before.st_size, named) == (path.stat().st_ino, path.stat().st_size, False)


@pytest.mark.parametrize("kept", [0, 10, 10_000, -1])
def test_a_damaged_checkpoint_is_named(kept: int, trained: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(trained / "checkpoint_last.pt", tmp_path))
    os.truncate(path, kept % path.stat().st_size)
    with pytest.raises(OSError, match=r"checkpoint_last\.pt is damaged and cannot be read"):
        checkpoint_utils.load_checkpoint_to_cpu(str(path))


def damage(path: Path) -> str:
    """Change bytes in the middle of the largest record of a checkpoint; return the record's name."""
    with zipfile.ZipFile(path) as archive:
        record = max(archive.infolist(), key=lambda each: each.file_size)
    content = bytearray(path.read_bytes())
    middle = record.header_offset + record.file_size // 2
    content[middle : middle + 100] = bytes(byte ^ 85 for byte in content[middle : middle + 100])
    path.write_bytes(content)
    return record.filename


def test_every_reader_refuses_damaged_records(data: Path, save: Path, tmp_path: Path) -> None:
    """torch would load damaged records; the error names the record and the newest other checkpoint."""
    path, new = save / "checkpoint_last.pt", tmp_path / "new"
    error = f"{path} is damaged and cannot be read: its record {damage(path)!r} is corrupt"
    for option, folder in (("restore-file", save), ("finetune-from-model", tmp_path / "begun")):
        assert error in fail([*options(data, 9), f"--{option}", path], folder), option
    found = run("generate", data, "--user-dir", USER_DIR, "--path", path, succeeds=False).stderr
    assert f"{error}: " in found
    assert re.search(rf"the newest undamaged checkpoint beside it is {save}/checkpoint_(best|1_6)\.pt$", found)
    with pytest.raises(OSError, match=re.escape(error)):
        ConvS2SModel.from_pretrained(str(save), path.name, str(data))
    for command in (
        ["average", path, path, "--output", new],
        ["export", path, new, "--data", data],
        ["import-fconv", path, new],
        ["plot-branches", path, "--output", new.with_suffix(".svg")],
    ):
        with pytest.raises(SystemExit, match=re.escape(error)):
            cli.main([*map(str, command)])
    assert {*tmp_path.iterdir()} == {save, tmp_path / "begun"}


@pytest.mark.parametrize("cut", [True, False])
def test_training_resumes_from_the_newest_undamaged_checkpoint(cut: bool, data: Path, save: Path) -> None:
    """The last update's checkpoints are truncated or have a damaged record; an averaged checkpoint is not used."""
    (save / "checkpoint_averaged.pt").write_bytes((save / "checkpoint_1_3.pt").read_bytes())
    for name, size in (("checkpoint_last.pt", 10_000), ("checkpoint_best.pt", 10_000), ("checkpoint_1_6.pt", 0)):
        if cut:
            os.truncate(save / name, size)
        else:
            damage(save / name)
    assert updates(resume(options(data, 9), save)) == 9
    log = (save / "log").read_text()
    assert f"{save}/checkpoint_last.pt is damaged; training resumes from {save}/checkpoint_1_3.pt" in log
    assert "(epoch 1 @ 3 updates)" in log


def test_a_checkpoint_without_checksums_is_read(trained: Path, tmp_path: Path) -> None:
    """torch before 1.6 wrote no checksums, and later versions have an option to omit them."""
    state = torch.load(trained / "checkpoint_last.pt", weights_only=False)
    computed = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state, tmp_path / "new.pt")
    finally:
        torch.serialization.set_crc32_options(computed)
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name in ("new.pt", "old.pt"):
        assert saving.is_whole(tmp_path / name)
        assert checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / name))["model"].keys() == state["model"].keys()


def test_damaged_checkpoints_are_not_overwritten(data: Path, save: Path) -> None:
    for path in save.glob("*.pt"):
        os.truncate(path, 10_000)
    assert f"{save}/checkpoint_last.pt is damaged" in fail(options(data, 9), save)


FP16 = ["--fp16-init-scale", 4, "--fp16-scale-window", 3]


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    found = [{**faults.compared(each), "scale": each["extra_state"].get("loss_scale")} for each in (one, other)]
    assert not list(faults.differences(*found))


def rounded(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value.bfloat16().to(value.dtype) for name, value in state["model"].items()}


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("weighted_transformer_tiny", ["--bf16"]),
        ("convs2s_tiny", ["--fp16", *FP16]),
        ("convs2s_tiny", ["--memory-efficient-fp16", *FP16]),
    ],
)
def test_a_stopped_training_ends_as_if_undisturbed(
    architecture: str, options: list[object], data: Path, tmp_path: Path
) -> None:
    """Parameters, optimizer and loss scale are bit-equal."""
    undisturbed, _, stopped = (
        train(data, tmp_path / name, *options, "--max-update", most, architecture=architecture)
        for name, most in (("straight", 8), ("stopped", 5), ("stopped", 8))
    )
    assert_same(undisturbed, stopped)
    assert "no float32 parameters" not in (tmp_path / "stopped" / "log").read_text()


def test_two_stopped_processes_end_as_if_undisturbed(data: Path, tmp_path: Path) -> None:
    options = words(data, "--bf16", "--ddp-backend", "legacy_ddp")
    ended = []
    for name, limits in (("straight", [6]), ("stopped", [3, 6])):
        (tmp_path / name).mkdir()
        for most in limits:
            ranks = fork([*options, "--max-update", most], tmp_path / name)
            states = [faults.finish(rank, tmp_path / name) for rank in ranks]
        ended.append(states[0])
    assert_same(*ended)


@pytest.mark.parametrize(
    ("before", "after"),
    [("--bf16", "--restore-file FILE --reset-optimizer"), ("--cpu", "--finetune-from-model FILE --bf16")],
)
def test_another_precision_begins_with_the_same_parameters(before: str, after: str, data: Path, tmp_path: Path) -> None:
    """With learning rate zero, the parameters stay as they were loaded."""
    trained = train(data, tmp_path / "trained", before, "--max-update", 3)
    assert list(faults.differences(trained["model"], rounded(trained)))
    start = str(tmp_path / "trained" / "checkpoint_last.pt")
    options = [*after.replace("FILE", start).split(), "--lr", 0, "--max-update", 1]
    found = train(data, tmp_path / "again", *options)
    assert not list(faults.differences(trained["model"], found["model"]))


@pytest.mark.parametrize("option", ["--bf16", "--memory-efficient-bf16"])
def test_a_checkpoint_with_rounded_parameters_is_reported(option: str, data: Path, tmp_path: Path) -> None:
    """Plain fairseq saves rounded parameters; ``--memory-efficient-bf16`` has no float32 parameters to lose."""
    train(data, tmp_path, option, "--max-update", 3)
    path = tmp_path / "checkpoint_last.pt"
    saved = torch.load(path, weights_only=False)
    torch.save({**saved, "model": rounded(saved)}, path)
    train(data, tmp_path, option, "--max-update", 4)
    reports = [line for line in (tmp_path / "log").read_text().splitlines() if "no float32 parameters" in line]
    assert len(reports) == (option == "--bf16")
    assert all(str(path) in report for report in reports)


def config() -> FairseqConfig:
    cfg = FairseqConfig()
    cfg.common.fp16_scale_window = 4
    cfg.optimizer = Namespace(optimizer="sgd", lr=[0.1], momentum=0.0, weight_decay=0.0)
    return cfg


def test_parameters_in_one_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs have such a vector; here it is on the device None, like the storage of all CPU tensors."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    sizes = [torch.Size(size) for size in ((2, 3), (4,), ())]
    parameters = [torch.nn.Parameter(torch.randn(size).half()) for size in sizes]
    vector = FP16Optimizer.build_fp32_params(None, parameters, flatten=True)
    optimizer = FP16Optimizer(config(), parameters, None, vector)
    found = saving.masters(optimizer)
    assert [value.shape for value in found.values()] == sizes
    for number, parameter in enumerate(parameters):
        assert torch.equal(found[parameter], parameter.float())
        found[parameter].fill_(number)
    optimizer._sync_fp32_params_to_fp16()
    assert [parameter.unique().tolist() for parameter in parameters] == [[0], [1], [2]]


def test_checkpoints_at_time_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is saved within an epoch if neither this function nor the end of an epoch has saved for 10 s."""
    now, saved = 0, []
    monkeypatch.setattr(fairseq_cli.train, "validate_and_save", lambda *_: ([None], False))
    monkeypatch.setattr(checkpoint_utils, "save_checkpoint", lambda *_: saved.append(now))
    monkeypatch.setattr(saving.time, "monotonic", lambda: now)
    saving.save_every(10)
    cfg, ends = FairseqConfig(), (27, 49)
    for now in (4, 9, 12, 16, 23, *ends[:1], 32, 36, 38, *ends[1:], 58, 59):
        assert fairseq_cli.train.validate_and_save(cfg, None, None, None, [], now in ends) == ([None], False)
    assert saved == [12, 23, 38, 59]
    cfg.distributed_training.distributed_world_size = 2
    now = 99
    fairseq_cli.train.validate_and_save(cfg, None, None, None, [], False)
    assert saved == [12, 23, 38, 59]


def test_all_counters_of_the_loss_scale_are_saved() -> None:
    assert {name for name in vars(DynamicLossScaler()) if name.startswith("_")} == {*saving.COUNTERS}
