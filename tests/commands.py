"""fairseq's commands, run as users run them, on data made here."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
USER_DIR = ROOT / "user_dir"

# Small enough for seconds: one epoch is four updates.
MODEL = ["--encoder-layers", "[(16, 3)] * 2", "--decoder-layers", "[(16, 3)] * 2"]
SIZES = [
    option
    for name in ("encoder-embed-dim", "decoder-embed-dim", "decoder-out-embed-dim")
    for option in (f"--{name}", "16")
]
TRAINING = ["--optimizer", "nag", "--momentum", "0.99", "--lr", "0.25", "--clip-norm", "0.1", "--batch-size", "16"]
QUIET = ["--log-format", "json", "--num-workers", "0"]


def run(
    command: str, *arguments: object, cwd: Path = ROOT, stdin: str | None = None, succeeds: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run one of fairseq's commands (``train``, ``generate``, ...) in a process of its own."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"fairseq_cli.{command}", *map(str, arguments)],
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""},
    )
    if succeeds and result.returncode:
        raise AssertionError(f"fairseq-{command} failed:\n{result.stdout[-2000:]}\n{result.stderr[-6000:]}")
    if not succeeds and not result.returncode:
        raise AssertionError(f"fairseq-{command} did not fail:\n{result.stdout[-2000:]}")
    return result


def make_data(folder: Path) -> Path:
    """A small corpus, target = source backwards, and its binary form; returns the folder of the latter."""
    random.seed(1)
    words = [f"w{number}" for number in range(20)]
    for split, size in (("train", 64), ("valid", 16), ("test", 16)):
        sources = [random.choices(words, k=random.randint(1, 8)) for _ in range(size)]
        (folder / f"{split}.src").write_text("".join(" ".join(source) + "\n" for source in sources))
        (folder / f"{split}.tgt").write_text("".join(" ".join(reversed(source)) + "\n" for source in sources))
    prefixes = [f"--{name}pref={folder / name}" for name in ("train", "valid", "test")]
    options = ["-s", "src", "-t", "tgt", "--joined-dictionary", "--workers", 1]
    run("preprocess", *prefixes, *options, "--destdir", folder / "bin")
    return folder / "bin"


def hypotheses(output: str) -> dict[int, list[tuple[float, str]]]:
    """Scores and tokens of the hypotheses that fairseq-generate printed, for each sentence."""
    found: dict[int, list[tuple[float, str]]] = {}
    for line in output.splitlines():
        if line.startswith("H-"):
            name, score, text = line.split("\t")
            found.setdefault(int(name[2:]), []).append((float(score), text))
    return found
