"""Kill training at random moments, resume it, and compare with an uninterrupted training.

``make faults`` does this 20 times for each family.  Half of the kills wait for a half-written checkpoint, the others
come at any time.  Processes are forked from one that has imported fairseq, so most of their time is training.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils

import fairseq_plugins
from tests.commands import FORKED, QUIET, ROOT, USER_DIR, become, call, make_data

fairseq_plugins.install()

# These are the papers' schedules and optimizers.
FAMILIES = {
    "convs2s_tiny": "--optimizer nag --momentum 0.99 --lr 0.25 --clip-norm 0.1 --lr-scheduler anneal_after_plateau",
    "weighted_transformer_tiny": """--criterion weighted_label_smoothed_cross_entropy --label-smoothing 0.1
        --optimizer simplex_adam --lr-scheduler weighted_inverse_sqrt --warmup-updates 40 --branch-warmup-updates 20""",
    "conv_encoder_tiny": """--criterion label_smoothed_cross_entropy --label-smoothing 0.1 --optimizer adam --lr 0.001
        --clip-norm 1 --lr-scheduler inverse_sqrt --warmup-updates 20""",
}
COMMON = ["--max-tokens", 20, "--dropout", 0.1, "--save-interval-updates", 3, "--keep-interval-updates", 1]
COMMON += ["--no-epoch-checkpoints", "--cpu", "--user-dir", USER_DIR, *QUIET]
CHECKPOINTS_PER_EPOCH = 7  # an epoch has 21 or 22 updates


def start(words: Sequence[object], save: Path, file_size: int = resource.RLIM_INFINITY) -> BaseProcess:
    """Start ``fairseq-train``; each of its files may have at most ``file_size`` bytes."""
    # If fairseq sees a GPU, it computes the norm of gradients there, despite --cpu.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    log = save / "log"
    argv = ["fairseq-train", *map(str, words), "--save-dir", str(save)]
    arguments = (call("train"), argv, log, log, ROOT, environment, file_size)
    process = FORKED.Process(target=become, args=arguments, daemon=True)
    process.start()
    return process


def finish(process: BaseProcess, save: Path) -> dict[str, Any]:
    """Wait until training has ended, and return its last checkpoint."""
    process.join()
    if process.exitcode:
        raise AssertionError(f"training failed:\n{(save / 'log').read_text()[-6000:]}")
    return checkpoint_utils.load_checkpoint_to_cpu(str(save / "checkpoint_last.pt"))


def times(save: Path, pattern: str) -> set[tuple[str, int]]:
    """Return the files of this name with the times of their last change."""
    found = set()
    for path in save.glob(pattern):
        with contextlib.suppress(FileNotFoundError):
            found.add((path.name, path.stat().st_mtime_ns))
    return found


def wait_for_a_write(process: BaseProcess, save: Path, pattern: str) -> None:
    before = times(save, pattern)
    while process.is_alive() and times(save, pattern) <= before:
        time.sleep(0.0002)


def kill(process: BaseProcess, save: Path, checkpoints: int, moments: random.Random) -> str:
    """Kill training a moment after it has written this many checkpoints, and return the kind of moment."""
    left = times(save, "*.tmp")  # written by earlier processes
    for _ in range(checkpoints):
        wait_for_a_write(process, save, "checkpoint_last.pt")
    if moments.random() < 0.5:
        process.join(moments.uniform(0, 0.1))
    else:
        wait_for_a_write(process, save, moments.choice(["*.tmp", "checkpoint_last.pt.*.tmp"]))
    process.kill()
    process.join()
    assert process.exitcode, "training ended before it could be killed: it takes more epochs"
    return "while a checkpoint was written" if times(save, "*.tmp") - left else "at another moment"


def differences(one: object, other: object, name: str = "") -> Iterator[str]:
    """Return the names of all entries that are not bit-equal in two checkpoints."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in {**one, **other}:
            yield from differences(one.get(key), other.get(key), f"{name}.{key}")
    elif isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.dtype != other.dtype or not torch.equal(one, other):
            yield name
    elif one != other:
        yield name


def compared(state: dict[str, Any]) -> dict[str, Any]:
    """Return the parts in which the checkpoints of two trainings must agree: all but times, options and statistics."""
    history = state["optimizer_history"][-1]
    extra = {name: state["extra_state"][name] for name in ("train_iterator", "val_loss", "best")}
    return {"model": state["model"], "optimizer": state["last_optimizer_state"], "history": history, "extra": extra}


def survive(data: Path, folder: Path, architecture: str, kills: int, epochs: int, seed: int) -> Counter[str]:
    """Train an architecture with and without kills.

    Returns the number of kills by kind of moment.  Raises AssertionError if the trainings end differently.
    """
    words = [data, "--arch", architecture, *FAMILIES[architecture].split(), *COMMON, "--max-epoch", epochs]
    undisturbed, disturbed = (folder / f"{architecture}.{name}" for name in ("undisturbed", "disturbed"))
    for save in (undisturbed, disturbed):
        save.mkdir()
    expected = finish(start(words, undisturbed), undisturbed)
    moments, counts = random.Random(f"{architecture} {seed}"), Counter[str]()
    for _ in range(kills):
        most = CHECKPOINTS_PER_EPOCH * epochs // (kills + 1)
        counts[kill(start(words, disturbed), disturbed, moments.randint(most // 2, most), moments)] += 1
    found = finish(start(words, disturbed), disturbed)
    wrong = sorted(differences(compared(expected), compared(found)))
    assert not wrong, f"{architecture} differs in {wrong[:5]} after {dict(counts)}, seed {seed}"
    halves = [path.name for path in disturbed.glob("*.tmp")]
    assert not halves, f"half-written files are left: {halves}"
    return counts


def main() -> None:
    """Run all families, and print the number of survived kills."""
    parser = argparse.ArgumentParser(prog="make faults", description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="for each family")
    parser.add_argument("--epochs", type=int, default=9)
    parser.add_argument("--seed", type=int, default=1, help="of the moments")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = make_data(Path(folder))
        for architecture in FAMILIES:
            began = time.monotonic()
            counts = survive(data, Path(folder), architecture, options.kills, options.epochs, options.seed)
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
            seconds = time.monotonic() - began
            print(f"{architecture}: killed {kinds}; ended as if undisturbed ({seconds:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
