"""Damaged checkpoints are refused, and training resumes from the newest undamaged one."""

from __future__ import annotations

import os
import re
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils

from fairseq_plugins.cli import main as cli
from fairseq_plugins.convs2s.model import ConvS2SModel
from fairseq_plugins.repairs.contents import damage_of
from fairseq_plugins.repairs.resuming import newest_whole_checkpoint
from tests import faults
from tests.commands import USER_DIR, run
from tests.repairs.trainings import fail, options, updates


def test_training_goes_on_from_a_file_of_an_earlier_torch(tmp_path: Path) -> None:
    """Which was no archive."""
    torch.save({}, tmp_path / "checkpoint1.pt", _use_new_zipfile_serialization=False)
    assert newest_whole_checkpoint(tmp_path) == tmp_path / "checkpoint1.pt"


def test_training_passes_over_a_damaged_checkpoint(data: Path, save: Path) -> None:
    """All those of the last update are damaged, so the one before is taken."""
    for name in ("checkpoint_last.pt", "checkpoint_best.pt"):
        os.truncate(save / name, 10_000)
    os.truncate(save / "checkpoint_1_6.pt", 0)
    (save / "checkpoint_averaged.pt").write_bytes((save / "checkpoint_1_3.pt").read_bytes())  # not one of training's
    assert updates(faults.finish(faults.start(options(data, 9), save), save)) == 9
    log = (save / "log").read_text()
    assert f"{save}/checkpoint_last.pt is damaged; training goes on from {save}/checkpoint_1_3.pt" in log
    assert "(epoch 1 @ 3 updates)" in log


@pytest.mark.parametrize("kept", [0, 10, 10_000, -1])
def test_a_damaged_checkpoint_is_named(kept: int, trained: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(trained / "checkpoint_last.pt", tmp_path))
    os.truncate(path, kept % path.stat().st_size)
    with pytest.raises(OSError, match=r"checkpoint_last\.pt is damaged and cannot be read"):
        checkpoint_utils.load_checkpoint_to_cpu(str(path))


def damage(path: Path) -> str:
    """Write other bytes into the middle of the largest record of a checkpoint; return the record's name."""
    with zipfile.ZipFile(path) as archive:
        record = max(archive.infolist(), key=lambda each: each.file_size)
    content = bytearray(path.read_bytes())
    middle = record.header_offset + record.file_size // 2
    content[middle : middle + 100] = bytes(byte ^ 85 for byte in content[middle : middle + 100])
    path.write_bytes(content)
    return record.filename


def test_a_checkpoint_whose_records_are_damaged_is_refused_by_all_that_read_it(
    data: Path, save: Path, tmp_path: Path
) -> None:
    """Each of them loads it without a word otherwise; the error names the record and the newest of the others."""
    path, new = save / "checkpoint_last.pt", tmp_path / "new"
    error = f"{path} is damaged and cannot be read: its record {damage(path)!r} is not what was saved"
    for word in ("restore-file", "finetune-from-model"):
        assert error in fail([*options(data, 9), f"--{word}", path], save), word
    found = run("generate", data, "--user-dir", USER_DIR, "--path", path, succeeds=False).stderr
    assert f"{error}: " in found
    assert re.search(rf"the newest undamaged checkpoint beside it is {save}/checkpoint_(best|1_6)\.pt$", found)
    with pytest.raises(OSError, match=re.escape(error)):
        ConvS2SModel.from_pretrained(str(save), path.name, str(data))
    for words in (
        ["average", path, path, "--output", new],
        ["export", path, new, "--data", data],
        ["import-fconv", path, new],
        ["plot-branches", path, "--output", new.with_suffix(".svg")],
    ):
        with pytest.raises(SystemExit, match=re.escape(error)):
            cli.main([*map(str, words)])
    assert [*tmp_path.iterdir()] == [save]


def test_training_passes_over_checkpoints_with_damaged_records(data: Path, save: Path) -> None:
    """The best, which is as new as the last, is damaged too; and without --restore-file none is lost."""
    for name in ("checkpoint_last.pt", "checkpoint_best.pt", "checkpoint_1_6.pt"):
        damage(save / name)
    assert updates(faults.finish(faults.start(options(data, 9), save), save)) == 9
    log = (save / "log").read_text()
    assert f"{save}/checkpoint_last.pt is damaged; training goes on from {save}/checkpoint_1_3.pt" in log
    assert "(epoch 1 @ 3 updates)" in log


@pytest.mark.parametrize("record", ["data.pkl", "byteorder", "version"])
def test_every_record_is_compared_with_its_checksum(record: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    checkpoint_utils.torch_persistent_save({"model": {"weight": torch.zeros(1)}, "extra": "a" * 9}, str(path))
    with zipfile.ZipFile(path) as archive:
        content = archive.read(f"archive/{record}")
    path.write_bytes(path.read_bytes().replace(content, content[:-1] + b"x"))
    with path.open("rb") as file:
        assert f"its record 'archive/{record}' is not what was saved" in str(damage_of(file))


def test_a_checkpoint_without_checksums_is_read(trained: Path, tmp_path: Path) -> None:
    """torch before 1.6 wrote none, and today's writes none if it is told so."""
    state = torch.load(trained / "checkpoint_last.pt", weights_only=False)
    computed = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state, tmp_path / "new.pt")
    finally:
        torch.serialization.set_crc32_options(computed)
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name in ("new.pt", "old.pt"):
        assert checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / name))["model"].keys() == state["model"].keys()


def test_where_all_are_damaged_none_is_lost(data: Path, save: Path) -> None:
    for path in save.glob("*.pt"):
        os.truncate(path, 10_000)
    assert f"{save}/checkpoint_last.pt is damaged" in fail(options(data, 9), save)
