"""fairseq's commands, run as users run them, on data made here."""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import random
import resource
import socket
import subprocess
import sys
import tempfile
import warnings
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy
import torch

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


# Its processes are forked from one that has imported fairseq, which takes four seconds, and not this plugin.
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload([__name__, "fairseq.trainer", "fairseq.tasks", "hydra.main"])


def become(
    command: str,
    words: Sequence[str],
    output: Path,
    errors: Path,
    cwd: Path,
    environment: Mapping[str, str],
    file_size: int = resource.RLIM_INFINITY,
) -> None:
    """What one of fairseq's commands does, in a process of `FORKED`.

    Args:
        command: as its module is called.
        words: on the command line.
        output: the file that it prints into.
        errors: the same of stderr.
        cwd: where it runs.
        environment: what it finds there.
        file_size: bytes that its files can have at most.
    """
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
    for descriptor, path in ((1, output), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    # What a process of this kind would do in another way than one that a user starts.
    multiprocessing.set_start_method("fork", force=True)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    numpy.random.seed()  # noqa: NPY002  (fairseq draws from it)
    if command == "train":  # the only one that sets up logging before it imports fairseq, which does so too
        logging.getLogger().handlers.clear()
    sys.argv = [f"fairseq-{command}", *words]
    importlib.import_module(f"fairseq_cli.{command}").cli_main()


def run(
    command: str,
    *arguments: object,
    cwd: Path = ROOT,
    stdin: str | bytes = b"",
    succeeds: bool = True,
    path: Path | str = "",
    anew: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run one of fairseq's commands (``train``, ``generate``, ...) in a process of its own.

    Args:
        command: as its module is called.
        arguments: on the command line.
        cwd: where it runs.
        stdin: its input.
        succeeds: whether it has to, or to fail.
        path: PYTHONPATH.
        anew: whether Python is started for it, as it is where there is input or a path.
    """
    words = [*map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(path)}
    if anew or stdin or path:
        finished = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", f"fairseq_cli.{command}", *words],
            cwd=cwd,
            input=stdin.encode() if isinstance(stdin, str) else stdin,
            capture_output=True,
            check=False,
            env=environment,
        )
        status, printed = finished.returncode, (finished.stdout, finished.stderr)
    else:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            files = [folder / "output", folder / "errors"]
            for file in files:
                file.touch()
            process = FORKED.Process(target=become, args=(command, words, *files, cwd, environment))
            process.start()
            process.join()
            status, printed = process.exitcode, [file.read_bytes() for file in files]
    result = subprocess.CompletedProcess([command, *words], status, *map(bytes.decode, printed))
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


_KEEP_THE_MODEL = """
import sys, torch
from fairseq import trainer
from fairseq_cli.train import cli_main
out = sys.argv.pop()
made, init = [], trainer.Trainer.__init__
def keep(self, *args, **kwargs):
    init(self, *args, **kwargs)
    made.append(self)
trainer.Trainer.__init__ = keep
cli_main()
torch.save(made[0].get_model().state_dict(), out)
"""


def train_two_processes_and_one(
    folder: Path, *options: object, backend: str = "legacy_ddp"
) -> tuple[list[str], list[dict[str, torch.Tensor]]]:
    """Train with two processes, and with one that has twice the update frequency, all at the same time.

    Returns:
        for the two ranks and the single process, what it printed and the parameters that it ended with.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    parallel = ["--distributed-world-size", "2", "--distributed-backend", "gloo", "--ddp-backend", backend]
    parallel += ["--distributed-no-spawn", "--distributed-init-method", f"tcp://127.0.0.1:{port}", "--distributed-rank"]
    processes = []
    for number, more in enumerate([[*parallel, 0], [*parallel, 1], ["--update-freq", 2]]):
        words = [*options, "--save-dir", folder / f"save{number == 2}", *more, folder / f"{number}.pt"]
        command = [sys.executable, "-W", "ignore", "-c", _KEEP_THE_MODEL, *map(str, words)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        processes.append(
            subprocess.Popen(
                command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        )
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-4000:]
    return outputs, [torch.load(folder / f"{number}.pt") for number in range(3)]


def save_model(model: torch.nn.Module, args: Namespace, path: Path) -> Path:
    """A checkpoint as fairseq's trainer writes it, of a model that was built with these options."""
    history = [{"num_updates": 1, "optimizer_name": "adam", "lr_scheduler_state": {}, "criterion_name": "x"}]
    torch.save({"args": args, "model": model.state_dict(), "optimizer_history": history, "extra_state": {}}, path)
    return path


def hypotheses(output: str) -> dict[int, list[tuple[float, str]]]:
    """Scores and tokens of the hypotheses that fairseq-generate printed, for each sentence."""
    found: dict[int, list[tuple[float, str]]] = {}
    for line in output.splitlines():
        if line.startswith("H-"):
            name, score, text = line.split("\t")
            found.setdefault(int(name[2:]), []).append((float(score), text))
    return found
