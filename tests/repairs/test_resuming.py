"""Begin, resume and fine-tune from checkpoints: the right one, or a clear error."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.dataclass.configs import CheckpointConfig

from fairseq_plugins.cli import main as cli
from fairseq_plugins.repairs.records import refuse_missing_file
from fairseq_plugins.repairs.resuming import fingerprint
from tests import faults
from tests.commands import USER_DIR, run
from tests.repairs.trainings import fail, options, updates


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
