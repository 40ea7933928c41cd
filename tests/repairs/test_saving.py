"""Checkpoints that cannot be written, or that nothing can go on from: a clear error, and nothing is lost."""

from __future__ import annotations

import multiprocessing
import os
import re
import resource
import shutil
import signal
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.dataclass.configs import CheckpointConfig
from fairseq.file_io import PathManager

from fairseq_plugins.cli import main as cli
from fairseq_plugins.convs2s.model import ConvS2SModel
from fairseq_plugins.repairs.contents import damage_of
from fairseq_plugins.repairs.records import refuse_missing_file
from fairseq_plugins.repairs.resuming import fingerprint, newest_whole_checkpoint
from tests import faults
from tests.commands import USER_DIR, full_disk, run


def options(data: Path, updates: int, architecture: str = "convs2s_tiny") -> list[object]:
    """A training with a checkpoint after every third update."""
    family = faults.FAMILIES[architecture].split()
    return [data, "--arch", architecture, *family, *faults.COMMON, "--max-update", updates, "--no-epoch-checkpoints"]


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints after 3 updates, and after 6, the best and the last."""
    folder = tmp_path_factory.mktemp("trained")
    faults.finish(faults.start([*options(data, 6), "--keep-interval-updates", 2], folder), folder)
    return folder


@pytest.fixture
def save(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "save")
    (tmp_path / "save" / "log").unlink()
    return tmp_path / "save"


def contents(save: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in save.iterdir() if path.name != "log"}


def fail(words: list[object], save: Path, file_size: int = resource.RLIM_INFINITY) -> str:
    """Start a training that fails and changes nothing; returns the last line of its output."""
    before = contents(save)
    process = faults.start(words, save, file_size)
    process.join()
    assert process.exitcode == 1
    assert contents(save) == before
    return (save / "log").read_text().splitlines()[-1]


def updates(state: dict) -> int:
    return state["optimizer_history"][-1]["num_updates"]


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


def test_training_goes_on_from_a_file_of_an_earlier_torch(tmp_path: Path) -> None:
    """Which was no archive."""
    torch.save({}, tmp_path / "checkpoint1.pt", _use_new_zipfile_serialization=False)
    assert newest_whole_checkpoint(tmp_path) == tmp_path / "checkpoint1.pt"


def test_a_failed_copy_leaves_what_was_there(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path, source = tmp_path / "checkpoint_last.pt", tmp_path / "checkpoint1.pt"
    path.write_text("before")
    source.write_bytes(bytes(200_000))
    request.getfixturevalue("_full_disk")
    with pytest.raises(OSError, match=r"checkpoint_last\.pt was not written: \[Errno 27\]"):
        PathManager.copy(str(source), str(path), overwrite=True)
    assert path.read_text() == "before"
    assert sorted(tmp_path.iterdir()) == [source, path]


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


def test_training_goes_on_where_the_last_is_missing(data: Path, save: Path) -> None:
    """As after the first epoch, when the disk is full before its copy is made: from the newest one there is."""
    for name in ("checkpoint_last.pt", "checkpoint_best.pt"):
        (save / name).unlink()
    os.utime(save / "checkpoint_1_3.pt", (0, 0))  # where times of files are coarse, too
    assert updates(faults.finish(faults.start(options(data, 9), save), save)) == 9
    log = (save / "log").read_text()
    assert f"{save}/checkpoint_last.pt is missing; training goes on from {save}/checkpoint_1_6.pt" in log
    assert "(epoch 1 @ 6 updates)" in log


def test_fine_tuning_goes_on_and_starts_with_what_is_tuned(data: Path, save: Path) -> None:
    """What is to be fine-tuned, in the same folder, is not one of the fine-tuning; nor is a newer one beside it."""
    for name in ("checkpoint_last.pt", "checkpoint_best.pt"):
        (save / name).unlink()
    os.utime(save / "checkpoint_1_6.pt")
    tuned = save / "checkpoint_1_3.pt"
    words = [*options(data, 2), "--finetune-from-model", tuned]
    assert updates(faults.finish(faults.start(words, save), save)) == 2
    assert "checkpoint_last.pt is missing" not in (save / "log").read_text()
    (save / "checkpoint_last.pt").unlink()
    words = [*options(data, 4), "--finetune-from-model", tuned]
    state = faults.finish(faults.start(words, save), save)
    assert updates(state) == 4
    assert "checkpoint_last.pt is missing; training goes on from" in (save / "log").read_text()
    assert "(epoch 1 @ 2 updates)" in (save / "log").read_text()
    chosen = state["cfg"]["checkpoint"]
    assert (chosen["restore_file"], chosen["finetune_from_model"]) == ("checkpoint_last.pt", str(tuned))


def test_fine_tuning_goes_on_with_its_own_start_alone(data: Path, trained: Path, save: Path, tmp_path: Path) -> None:
    """Wherever that lies by now; fairseq goes on with any, and another seed's start would be what is measured."""
    start, other, out = save / "checkpoint_1_3.pt", save / "checkpoint_1_6.pt", tmp_path / "out"
    out.mkdir()
    tuning = [*options(data, 2), "--finetune-from-model"]
    faults.finish(faults.start([*tuning, start], out), out)
    message = fail([*tuning, other], out)
    assert f"checkpoint_1_6.pt: the training in {out}/checkpoint_last.pt has begun with another checkpoint" in message
    assert updates(faults.finish(faults.start(options(data, 3), out), out)) == 3
    moved = start.rename(tmp_path / "start.pt")
    assert updates(faults.finish(faults.start([*options(data, 4), "--finetune-from-model", moved], out), out)) == 4
    shutil.copy(other, moved)
    assert "has begun with another checkpoint" in fail([*tuning, moved], out)


@pytest.mark.parametrize("exists", [True, False])
def test_a_training_is_not_taken_for_a_fine_tuning(data: Path, save: Path, tmp_path: Path, exists: bool) -> None:
    """Of a folder with a training from random parameters fairseq goes on with that one."""
    start = tmp_path / "start.pt"
    if exists:
        shutil.copy(save / "checkpoint_1_3.pt", start)
    message = fail([*options(data, 9), "--finetune-from-model", start], save)
    assert "checkpoint_last.pt has begun with random parameters" in message


def test_fingerprints_of_old_files(tmp_path: Path) -> None:
    """Files of torch before 1.6 hold no checksums."""
    for name in ("a.pt", "b.pt"):
        torch.save({"name": name}, tmp_path / name, _use_new_zipfile_serialization=False)
    shutil.copy(tmp_path / "a.pt", tmp_path / "moved.pt")
    first, second, moved, missing = (fingerprint(str(tmp_path / f"{name}.pt")) for name in ("a", "b", "moved", "none"))
    assert first == moved != second
    assert (missing, None in (first, second)) == (None, False)


@pytest.mark.parametrize("option", ["--restore-file", "--finetune-from-model", "--continue-once"])
def test_a_named_file_that_is_missing_is_refused(data: Path, save: Path, tmp_path: Path, option: str) -> None:
    """Random parameters would take the places of all that was trained; only where nothing is named training begins."""
    begun, name = tmp_path / "begun", save if option == "--finetune-from-model" else "checkpoint_1_3.pt"
    begun.mkdir()  # the other two options begin a training only where none is
    message = fail([*options(data, 9), option, name], save if option == "--restore-file" else begun)
    assert message.startswith(f"ValueError: {option} {name}: ")
    assert message.endswith("checkpoint_1_3.pt does not exist") == (option == "--continue-once")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("checkpoint1.pt", "checkpoint1.pt"),  # in the folder, and not where the command was started
        ("other/checkpoint1.pt", "checkpoint1.pt"),
        ("checkpoint1", "checkpoint1.pt"),
        ("./checkpoint_last.pt", "checkpoint_last.pt"),
        ("{}", "checkpoint_last.pt"),
        ("{}/checkpoint1", "checkpoint1.pt"),
        ("none.pt", None),
    ],
)
def test_a_missing_file_is_found_elsewhere(name: str, found: str | None, tmp_path: Path) -> None:
    for each in ("checkpoint1.pt", "checkpoint_last.pt"):
        (tmp_path / each).touch()
    name = name.format(tmp_path)
    with pytest.raises(ValueError, match=rf"is {tmp_path}/{found}$" if found else "does not exist$"):
        refuse_missing_file(CheckpointConfig(save_dir=str(tmp_path), restore_file=name), name)


def test_a_link_to_a_checkpoint_that_is_gone_is_no_first_start(data: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoint_last.pt").symlink_to(tmp_path / "gone.pt")
    process = faults.start(options(data, 3), tmp_path)
    process.join()
    assert process.exitcode == 1
    assert "ValueError: --restore-file" in (tmp_path / "log").read_text()


def test_hydra_refuses_a_missing_file(data: Path, trained: Path, tmp_path: Path) -> None:
    """And finds one of that name where the command was started: hydra changes to a folder of its own."""
    words = ["task=translation", f"task.data={data}", "criterion=cross_entropy", f"common.user_dir={USER_DIR}"]
    words += ["+model._name=convs2s_tiny", "optimizer=adam", "lr_scheduler=fixed", "dataset.batch_size=16"]
    words += ["checkpoint.restore_file=checkpoint_1_3.pt", f"hydra.run.dir={tmp_path}", "optimization.max_update=1"]
    error = run("hydra_train", *words, cwd=trained, succeeds=False).stderr
    assert re.search(rf"ValueError: --restore-file checkpoint_1_3\.pt: .* is {trained}/checkpoint_1_3\.pt", error)


def test_training_goes_on_with_an_optimizer_or_says_how(data: Path, save: Path, tmp_path: Path) -> None:
    """Warm-up would come a second time, and in the middle of training."""
    without, begun = tmp_path / "without.pt", tmp_path / "begun"
    begun.mkdir()
    cli.main(["average", str(save / "checkpoint_1_3.pt"), str(save / "checkpoint_1_6.pt"), "--output", str(without)])
    message = fail([*options(data, 9), "--restore-file", without], save)
    assert message.startswith(f"ValueError: --restore-file {without} has no optimizer state")
    for fix in ("--finetune-from-model", "--reset-optimizer"):
        assert fix in message
    words = [*options(data, 2), "--finetune-from-model", without, "--no-save-optimizer-state"]
    assert updates(faults.finish(faults.start(words, begun), begun)) == 2
    assert f"ValueError: --restore-file {begun}/checkpoint_last.pt has no optimizer state" in fail(words, begun)
    reset = [*options(data, 3), "--reset-optimizer", "--restore-file", without]
    assert updates(faults.finish(faults.start(reset, begun), begun)) == 3


def test_an_unknown_metric_does_not_lose_the_epoch(data: Path, tmp_path: Path) -> None:
    """It is found out when the first validation is over."""
    words = [*options(data, 50), "--save-interval-updates", 0, "--max-epoch", 1]
    process = faults.start([*words, "--best-checkpoint-metric", "bleu", "--maximize-best-checkpoint-metric"], tmp_path)
    process.join()
    assert process.exitcode == 1
    last = (tmp_path / "log").read_text().splitlines()[-1]
    assert "--best-checkpoint-metric bleu: validation has logged, above, what it can be" in last
    assert [path.name for path in tmp_path.glob("*.pt")] == ["checkpoint_last.pt"]
    epoch = updates(checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "checkpoint_last.pt")))
    words += ["--best-checkpoint-metric", "ppl", "--max-epoch", 2]
    assert updates(faults.finish(faults.start(words, tmp_path), tmp_path)) == 2 * epoch
    assert f"(epoch 2 @ {epoch} updates)" in (tmp_path / "log").read_text()


def test_a_moving_average_begins_with_what_is_fine_tuned(data: Path, trained: Path, tmp_path: Path) -> None:
    start = trained / "checkpoint_last.pt"
    words = [*options(data, 1), "--finetune-from-model", start, "--store-ema", "--ema-decay", 0.5]
    state = faults.finish(faults.start(words, tmp_path), tmp_path)
    before, after = torch.load(start)["model"], state["model"]
    for name, average in state["extra_state"]["ema"].items():
        if average.is_floating_point():
            torch.testing.assert_close(average, (before[name] + after[name]) / 2)


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


def with_other_words(data: Path, folder: Path, more: str = "") -> Path:
    """The same data with another dictionary: every word has another name, and there may be more of them."""
    shutil.copytree(data, folder)
    for path in folder.glob("dict.*"):
        path.write_text(path.read_text().replace("w", "v") + more)
    return folder


def test_a_checkpoint_of_something_else_is_refused(data: Path, save: Path, tmp_path: Path) -> None:
    named = f"{save}/checkpoint_last.pt"
    for other in ("conv_encoder", "weighted_transformer"):  # with another and with a later version of its layers
        error = f"RuntimeError: {named}: it holds a model of the family convs2s, and --arch asks for one of {other}"
        assert fail(options(data, 9, f"{other}_tiny"), save) == error
    newer = torch.load(named, weights_only=False)
    newer["model"]["version"] += 1
    begun = tmp_path / "begun"
    begun.mkdir()
    torch.save(newer, tmp_path / "newer.pt")
    error = f"RuntimeError: {tmp_path / 'newer.pt'}: the checkpoint has the layout of version 2 of the convs2s models"
    told = fail([*options(data, 3), "--finetune-from-model", tmp_path / "newer.pt"], begun)
    assert told == f"{error}, and this code knows 1; a newer fairseq_plugins will load it"
    larger = with_other_words(data, tmp_path / "larger", "more 1\n" * 1 + "words 1\n")
    assert named in fail(options(larger, 9), save)
    assert "size mismatch for encoder" in (save / "log").read_text()
    errors = fail([*options(larger, 3), "--finetune-from-model", named], begun)
    assert f"RuntimeError: {named}: not of the vocabulary or the architecture asked for; data for a model" in errors
    assert "size mismatch for encoder" in errors
    other = with_other_words(data, tmp_path / "other")
    assert f"{named} was trained with other source words" in fail(options(other, 9), save)
    tuned = tmp_path / "tuned"
    tuned.mkdir()
    tuning = [*options(other, 3), "--finetune-from-model", named]
    assert updates(faults.finish(faults.start(tuning, tuned), tuned)) == 3
    told = f"{named} was trained with other target words than those of this data: each gets what was learned"
    assert told in (tuned / "log").read_text()

    failed = run("generate", larger, "--user-dir", USER_DIR, "--path", named, "--cpu", succeeds=False)
    assert f"RuntimeError: {named}: not of the vocabulary or the architecture asked for" in failed.stderr
    failed = run("generate", other, "--user-dir", USER_DIR, "--path", named, "--cpu", succeeds=False)
    assert f"ValueError: {named} was trained with other source words than those of this data" in failed.stderr
