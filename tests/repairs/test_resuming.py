"""Trainings begin, resume, fine-tune and end with the right checkpoint, or a clear error."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.dataclass.configs import CheckpointConfig

from fairseq_plugins.cli import main as cli
from fairseq_plugins.repairs import resuming
from fairseq_plugins.repairs.saving import fingerprint
from tests import faults
from tests.commands import USER_DIR, run
from tests.repairs.trainings import fail, options, resume, train, updates


def test_training_resumes_where_the_last_checkpoint_is_missing(data: Path, save: Path) -> None:
    """The newest checkpoint is used; a full disk may have prevented the copy to the last one."""
    for name in ("checkpoint_last.pt", "checkpoint_best.pt"):
        (save / name).unlink()
    os.utime(save / "checkpoint_1_3.pt", (0, 0))  # file systems may store whole seconds
    assert updates(resume(options(data, 9), save)) == 9
    log = (save / "log").read_text()
    assert f"{save}/checkpoint_last.pt is missing; training resumes from {save}/checkpoint_1_6.pt" in log
    assert "(epoch 1 @ 6 updates)" in log


def test_fine_tuning_resumes_only_with_its_own_start(data: Path, save: Path, tmp_path: Path) -> None:
    """The start may have moved, or be missing, but another start is refused; the last checkpoint may be missing."""
    start, other, out = save / "checkpoint_1_3.pt", save / "checkpoint_1_6.pt", tmp_path / "out"
    tuning = [*options(data, 2), "--finetune-from-model"]
    out.mkdir()
    resume([*tuning, start], out)
    for each in (other, save / "checkpoint_best.pt"):
        assert re.search(rf"error: --finetune-from-model {each}: .*{out}/checkpoint_last", fail([*tuning, each], out))
    (out / "checkpoint_last.pt").unlink()
    assert "--finetune-from-model" in fail([*tuning, other], out)
    state = resume([*options(data, 3), "--finetune-from-model", start], out)
    assert (updates(state), state["cfg"]["checkpoint"]["finetune_from_model"]) == (3, str(start))
    assert "checkpoint_last.pt is missing; training resumes from" in (out / "log").read_text()
    moved = start.rename(tmp_path / "start.pt")
    assert updates(resume([*options(data, 4), "--finetune-from-model", moved], out)) == 4
    moved.unlink()
    assert updates(resume([*options(data, 5), "--finetune-from-model", moved], out)) == 5
    shutil.copy(other, moved)
    assert "--finetune-from-model" in fail([*tuning, moved], out)


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("last", [True, False])
def test_the_folder_of_another_training_is_refused(
    data: Path, save: Path, tmp_path: Path, exists: bool, last: bool
) -> None:
    """The other training began with random parameters; without a last checkpoint, fairseq would overwrite its files."""
    start = tmp_path / "start.pt"
    if exists:
        shutil.copy(save / "checkpoint_1_3.pt", start)
    if not last:
        (save / "checkpoint_last.pt").unlink()
    message = fail([*options(data, 9), "--finetune-from-model", start, "--no-last-checkpoints"], save)
    assert message.startswith(f"fairseq-train: error: --finetune-from-model {start}: ")
    assert "random parameters" in message


def test_fingerprints_of_old_files(tmp_path: Path) -> None:
    """Files of torch before 1.6 have no checksums."""
    for name in ("a.pt", "b.pt"):
        torch.save({"name": name}, tmp_path / name, _use_new_zipfile_serialization=False)
    shutil.copy(tmp_path / "a.pt", tmp_path / "moved.pt")
    first, second, moved, missing = (fingerprint(str(tmp_path / f"{name}.pt")) for name in ("a", "b", "moved", "none"))
    assert first == moved != second
    assert (missing, None in (first, second)) == (None, False)


@pytest.mark.parametrize("option", ["--restore-file", "--finetune-from-model", "--continue-once"])
def test_a_missing_file_is_refused(data: Path, save: Path, tmp_path: Path, option: str) -> None:
    """Random parameters would overwrite the folder; the last two options only begin a training in an empty folder."""
    name = save if option == "--finetune-from-model" else "none.pt"
    message = fail([*options(data, 9), option, name], save if option == "--restore-file" else tmp_path / "begun")
    assert message.startswith(f"fairseq-train: error: {option} {name}: ")


def test_a_broken_link_is_not_a_first_start(data: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoint_last.pt").symlink_to(tmp_path / "gone.pt")
    process = faults.start(options(data, 3), tmp_path)
    process.join()
    assert process.exitcode == 1
    assert "error: --restore-file" in (tmp_path / "log").read_text()


def test_a_checkpoint_without_optimizer_is_refused(data: Path, save: Path, tmp_path: Path) -> None:
    """Without an optimizer state, training would repeat the warm-up; both fixes that the error offers work."""
    without, begun = tmp_path / "without.pt", tmp_path / "begun"
    cli.main(["average", str(save / "checkpoint_1_3.pt"), str(save / "checkpoint_1_6.pt"), "--output", str(without)])
    message = fail([*options(data, 9), "--restore-file", without], save)
    assert message.startswith(f"fairseq-train: error: --restore-file {without} ")
    assert all(fix in message for fix in ("--finetune-from-model", "--reset-optimizer"))
    begun.mkdir()
    tuning = [*options(data, 2), "--finetune-from-model", without, "--no-save-optimizer-state"]
    assert updates(resume(tuning, begun)) == 2
    assert f"error: --restore-file {begun}/checkpoint_last.pt " in fail(tuning, begun)
    assert updates(resume([*options(data, 3), "--reset-optimizer", "--restore-file", without], begun)) == 3


def test_an_unknown_metric_does_not_lose_the_epoch(data: Path, tmp_path: Path) -> None:
    """fairseq knows the metrics only after the first validation."""
    command = [*options(data, 50), "--save-interval-updates", 0, "--max-epoch", 1]
    process = faults.start(
        [*command, "--best-checkpoint-metric", "bleu", "--maximize-best-checkpoint-metric"], tmp_path
    )
    process.join()
    assert process.exitcode == 1
    assert "error: --best-checkpoint-metric bleu " in (tmp_path / "log").read_text().splitlines()[-1]
    assert [path.name for path in tmp_path.glob("*.pt")] == ["checkpoint_last.pt"]
    epoch = updates(checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "checkpoint_last.pt")))
    assert updates(resume([*command, "--best-checkpoint-metric", "ppl", "--max-epoch", 2], tmp_path)) == 2 * epoch
    assert f"(epoch 2 @ {epoch} updates)" in (tmp_path / "log").read_text()


def with_other_words(data: Path, folder: Path, more: str = "") -> Path:
    """Copy data, with other names for all words of the dictionaries, and with ``more`` lines in the dictionaries."""
    shutil.copytree(data, folder)
    for path in folder.glob("dict.*"):
        path.write_text(path.read_text().replace("w", "v") + more)
    return folder


def test_a_checkpoint_of_another_model_is_refused(data: Path, save: Path, tmp_path: Path) -> None:
    last = save / "checkpoint_last.pt"
    message = fail(options(data, 9, "conv_encoder_tiny"), save)
    assert re.match(rf"RuntimeError: {last}: .*--arch", message)
    newer = torch.load(last, weights_only=False)
    newer["model"]["version"] += 1
    torch.save(newer, tmp_path / "newer.pt")
    message = fail([*options(data, 3), "--finetune-from-model", tmp_path / "newer.pt"], tmp_path / "begun")
    assert re.match(rf"RuntimeError: {tmp_path / 'newer.pt'}: .* version 2 .* up to 1: ", message)


def test_a_checkpoint_of_other_words_is_refused(data: Path, save: Path, tmp_path: Path) -> None:
    last, larger = save / "checkpoint_last.pt", with_other_words(data, tmp_path / "larger", "more 1\nwords 1\n")
    assert str(last) in fail(options(larger, 9), save)
    assert "size mismatch for encoder" in (save / "log").read_text()
    message = fail([*options(larger, 3), "--finetune-from-model", last], tmp_path / "begun")
    assert re.match(rf"RuntimeError: {last}: .*--srcdict --tgtdict.*size mismatch for encoder", message)
    other = with_other_words(data, tmp_path / "other")
    assert f"ValueError: {last}: the checkpoint's source dictionary differs" in fail(options(other, 9), save)
    assert updates(train(other, tmp_path / "tuned", "--max-update", 3, "--finetune-from-model", last)) == 3
    assert f"{last}: the checkpoint's target dictionary differs" in (tmp_path / "tuned" / "log").read_text()
    for folder in (larger, other):
        failed = run("generate", folder, "--user-dir", USER_DIR, "--path", last, "--cpu", succeeds=False)
        assert f"ValueError: {last}: the " in failed.stderr


def test_killed_training_ends_as_if_undisturbed(data: Path, tmp_path: Path) -> None:
    """Parameters, optimizer and schedule are bit-equal; ``make faults`` tests the same for longer."""
    counts = faults.survive(data, tmp_path, "convs2s_tiny", kills=3, epochs=3, seed=1)
    assert counts.total() == 3
    log = (tmp_path / "convs2s_tiny.disturbed" / "log").read_text()
    assert any(int(epoch) > 1 for epoch in re.findall(r"Loaded checkpoint .* \(epoch (\d+) @", log))


def test_a_finished_training_is_left_alone(data: Path, tmp_path: Path) -> None:
    assert updates(train(data, tmp_path, "--max-update", 4)) == 4
    before = (tmp_path / "checkpoint_last.pt").read_bytes()
    train(data, tmp_path, "--max-update", 4)
    assert (tmp_path / "checkpoint_last.pt").read_bytes() == before
    assert updates(train(data, tmp_path, "--max-update", 6)) == 6


def test_a_resumed_schedule_gets_the_last_validation(data: Path, tmp_path: Path) -> None:
    """The rate falls even if some epochs have no validation, and the metric is never better than at first."""
    command = ["--validate-interval", 2, "--best-checkpoint-metric", "bsz", "--save-interval-updates", 0]
    command += ["--max-tokens", 9999, "--max-epoch"]  # one update per epoch
    rates = []
    for name, epochs in (("straight", [6]), ("resumed", [5, 6])):
        states = [train(data, tmp_path / name, *command, epoch) for epoch in epochs]
        rates.append(states[-1]["optimizer_history"][-1]["lr_scheduler_state"]["lr"])
    assert rates == pytest.approx([0.0025, 0.0025])


@pytest.mark.parametrize("reset", [None, "reset_lr_scheduler", "reset_optimizer"])
def test_a_new_schedule_gets_no_validation(reset: str | None) -> None:
    steps = []
    trainer = SimpleNamespace(lr_step=lambda *given: steps.append(given))
    cfg = CheckpointConfig(**({} if reset is None else {reset: True}))
    resuming.finish_epoch(cfg, trainer, SimpleNamespace(epoch=3, iterations_in_epoch=0), {"val_loss": 1.5})
    assert steps == ([(2, 1.5)] if reset is None else [])


def test_the_next_training_of_a_process_starts_afresh(tmp_path: Path) -> None:
    """fairseq-hydra-train --multirun, for example, runs several trainings in one process."""
    checkpoint_utils.save_checkpoint.best = 0.0
    limits = SimpleNamespace(max_update=0, stop_time_hours=0.0)
    trainer = SimpleNamespace(
        checkpoint_suffix="",
        cfg=SimpleNamespace(optimization=limits, checkpoint=SimpleNamespace(patience=-1)),
        load_checkpoint=lambda *_, **__: None,
        get_train_iterator=lambda **_: SimpleNamespace(epoch=1),
        lr_step=lambda _: None,
        get_num_updates=lambda: 0,
        cumulative_training_time=lambda: 0.0,
    )
    checkpoint_utils.load_checkpoint(CheckpointConfig(save_dir=str(tmp_path)), trainer)
    assert not hasattr(checkpoint_utils.save_checkpoint, "best")


def test_patience_counts_across_processes(data: Path, tmp_path: Path) -> None:
    """At learning rate zero, no validation is better than the first, and three such validations end training."""
    command = ["--lr", 0, "--patience", 3]
    assert updates(train(data, tmp_path, *command, "--max-update", 3)) == 3  # one validation, which is the best so far
    assert updates(train(data, tmp_path, *command, "--max-update", 9)) == 9  # two validations without improvement
    ended = train(data, tmp_path, *command, "--max-update", 99)
    assert updates(ended) == 12
    again = train(data, tmp_path, *command, "--max-update", 99)
    assert updates(again) == 12
    assert all(torch.equal(value, again["model"][name]) for name, value in ended["model"].items())
