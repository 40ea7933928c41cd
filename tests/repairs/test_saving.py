"""Checkpoints that cannot be written: a clear error, and nothing is lost."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.file_io import PathManager

from tests import faults
from tests.commands import full_disk
from tests.repairs.trainings import fail, options, updates


@pytest.fixture
def _full_disk() -> Iterator[None]:
    with full_disk(100_000):
        yield


def test_a_full_disk_stops_training_and_nothing_else(data: Path, save: Path) -> None:
    size = (save / "checkpoint_last.pt").stat().st_size
    message = fail(options(data, 9), save, size // 2)
    assert f"{save}/checkpoint_1_9.pt was not written: [Errno 27] File too large" in message
    assert message.endswith(f"without --restore-file, training goes on from {save}/checkpoint_last.pt")
    assert updates(faults.finish(faults.start(options(data, 9), save), save)) == 9
    assert "checkpoint_last.pt (epoch 1 @ 6 updates)" in (save / "log").read_text()


def test_a_disk_that_is_full_before_the_first_checkpoint(data: Path, save: Path, tmp_path: Path) -> None:
    """The error promises no more than there is."""
    size, begun = (save / "checkpoint_last.pt").stat().st_size, tmp_path / "begun"
    begun.mkdir()
    message = fail(options(data, 4), begun, size // 2)
    assert message.endswith("File too large. No checkpoint is there yet: started again, training begins anew")


def test_a_copy_that_fails_names_what_training_goes_on_from(save: Path, request: pytest.FixtureRequest) -> None:
    """As after the first epoch, where there is no other last one yet."""
    (save / "checkpoint_last.pt").unlink()
    newest = save / "checkpoint_1_6.pt"
    os.utime(newest)
    request.getfixturevalue("_full_disk")
    with pytest.raises(OSError, match=rf"\. Started again, .* goes on from {newest}$"):
        PathManager.copy(str(newest), str(save / "checkpoint_last.pt"), overwrite=True)


@pytest.mark.usefixtures("_full_disk")
def test_nothing_is_left_of_what_could_not_be_written(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint_last.pt"
    path.write_text("before")
    with pytest.raises(OSError, match=r"averaged\.pt was not written: \[Errno 27\] File too large$"):
        checkpoint_utils.torch_persistent_save({"model": torch.zeros(100_000)}, str(tmp_path / "averaged.pt"))
    with pytest.raises(OSError, match=r"checkpoint_last\.pt was not written: \[Errno 27\]"):
        checkpoint_utils.torch_persistent_save({"model": torch.zeros(100_000)}, str(path))
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
    checkpoint_utils.torch_persistent_save({"model": torch.zeros(100)}, str(path))
    assert torch.equal(torch.load(path)["model"], torch.zeros(100))


@pytest.mark.parametrize("folder", ["x{}", "x{3}", "x}", "{a}"])
def test_braces_are_letters(folder: str, tmp_path: Path) -> None:
    path = tmp_path / folder / "checkpoint1.pt"
    path.parent.mkdir()
    checkpoint_utils.torch_persistent_save({"model": torch.zeros(1)}, str(path))
    assert list(path.parent.iterdir()) == [path]


def test_two_processes_write_one_name(tmp_path: Path) -> None:
    """As two trainings do that have one folder by mistake: each writes whole checkpoints."""
    path = tmp_path / "checkpoint_last.pt"

    def write() -> None:
        for _ in range(30):
            checkpoint_utils.torch_persistent_save({"model": torch.zeros(10_000)}, str(path))

    writers = [multiprocessing.get_context("fork").Process(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert list(tmp_path.iterdir()) == [path]
    assert torch.equal(torch.load(path)["model"], torch.zeros(10_000))


def test_what_killed_processes_have_left_is_removed(tmp_path: Path) -> None:
    """And nothing of what is still being written, here or on another machine."""
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


def test_where_no_file_can_be_renamed_it_is_written_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a storage that is no file system."""
    monkeypatch.setattr(PathManager, "supports_rename", lambda _: False)
    path, other = tmp_path / "checkpoint1.pt", tmp_path / "checkpoint_last.pt"
    other.touch()
    before = other.stat().st_ino
    checkpoint_utils.torch_persistent_save({"model": torch.zeros(1)}, str(path))
    PathManager.copy(str(path), str(other), overwrite=True)
    assert torch.equal(torch.load(other)["model"], torch.zeros(1))
    assert other.stat().st_ino == before


def test_a_failed_copy_leaves_what_was_there(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path, source = tmp_path / "checkpoint_last.pt", tmp_path / "checkpoint1.pt"
    path.write_text("before")
    source.write_bytes(bytes(200_000))
    request.getfixturevalue("_full_disk")
    with pytest.raises(OSError, match=r"checkpoint_last\.pt was not written: \[Errno 27\]"):
        PathManager.copy(str(source), str(path), overwrite=True)
    assert path.read_text() == "before"
    assert sorted(tmp_path.iterdir()) == [source, path]


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a power failure may leave the name, and nothing of the content."""
    path, synced, sync = tmp_path / "checkpoint1.pt", [], os.fsync

    def record(descriptor: int) -> None:
        synced.append((os.fstat(descriptor), path.exists()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    checkpoint_utils.torch_persistent_save({"model": torch.zeros(100)}, str(path))
    ((before, named),) = synced
    assert (before.st_ino, before.st_size, named) == (path.stat().st_ino, path.stat().st_size, False)
