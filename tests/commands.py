"""Run fairseq's commands as users do, on small data."""

from __future__ import annotations

import io
import json
import logging
import multiprocessing
import os
import random
import re
import resource
import runpy
import subprocess
import sys
import tempfile
import warnings
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from multiprocessing import connection, forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from fairseq import checkpoint_utils, trainer

ROOT = Path(__file__).resolve().parents[1]
USER_DIR = ROOT / "user_dir"
MAIN = "from fairseq_plugins.cli.main import main; main()"  # for python -c

# One epoch has four updates, and is trained in seconds.
MODEL = ["--encoder-layers", "[(16, 3)] * 2", "--decoder-layers", "[(16, 3)] * 2"]
SIZES = ["--encoder-embed-dim", "16", "--decoder-embed-dim", "16", "--decoder-out-embed-dim", "16"]
TRAINING = ["--optimizer", "nag", "--momentum", "0.99", "--lr", "0.25", "--clip-norm", "0.1", "--batch-size", "16"]
QUIET = ["--log-format", "json", "--num-workers", "0"]


# Processes are forked from one that has imported fairseq and torch's optimizers, which takes four seconds, but not
# this plugin.
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload([__name__, "fairseq.trainer", "fairseq.tasks", "hydra.main", "torch._dynamo"])


def become(
    code: str,
    argv: Sequence[str],
    output: Path | connection.Connection,
    errors: Path | connection.Connection,
    cwd: Path,
    environment: Mapping[str, str],
    file_size: int = resource.RLIM_INFINITY,
    stdin: Path = Path(os.devnull),
) -> None:
    """Run a program in a process of `FORKED`; files may have at most ``file_size`` bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
    for descriptor, to in ((1, output), (2, errors)):
        is_path = isinstance(to, Path)
        os.dup2(os.open(to, os.O_WRONLY | os.O_CREAT | os.O_APPEND) if is_path else to.fileno(), descriptor)
    os.dup2(os.open(stdin, os.O_RDONLY), 0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  (a descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    # These lines undo differences between a forked process and a process that a user starts.
    multiprocessing.set_start_method("fork", force=True)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    numpy.random.seed()  # noqa: NPY002  (fairseq's generator)
    if "fairseq_cli.train" in code:  # fairseq-train sets up logging before it imports fairseq, which does so again
        logging.getLogger().handlers.clear()
    sys.argv = [*argv]
    try:
        exec(code, {"__name__": "__main__"})
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


def call(command: str) -> str:
    """Return a program that runs one of fairseq's commands."""
    return f"from fairseq_cli.{command} import cli_main; cli_main()"


def forked(
    code: str, argv: Sequence[str], cwd: Path, environment: Mapping[str, str], given: bytes = b""
) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of `FORKED`."""
    with tempfile.TemporaryDirectory() as name:
        files = [Path(name, part) for part in ("output", "errors", "input")]
        for file, content in zip(files, (b"", b"", given), strict=True):
            file.write_bytes(content)
        arguments = (code, argv, *files[:2], cwd, environment, resource.RLIM_INFINITY, files[2])
        process = FORKED.Process(target=become, args=arguments)
        process.start()
        process.join()
        output, errors = (file.read_text(encoding="utf-8") for file in files[:2])
    return subprocess.CompletedProcess([*argv], process.exitcode, output, errors)


def started(
    words: Sequence[str], cwd: Path, environment: Mapping[str, str], given: bytes = b""
) -> subprocess.CompletedProcess[str]:
    """Run a command in a new process."""
    result = subprocess.run(words, cwd=cwd, input=given, capture_output=True, check=False, env=environment)
    return subprocess.CompletedProcess(words, result.returncode, result.stdout.decode(), result.stderr.decode())


class ForkedCommand:
    """A command of fairseq that own-data starts in a process of `FORKED`."""

    def __init__(self, words: Sequence[str], stdin: int | None = None, env: Any = None, **options: Any) -> None:
        code, *words = words[words.index("-c") + 1 :]
        # own-data's trainings end if own-data is not their parent; here the parent is a process of `FORKED`.
        code = f"import os; os.getppid = lambda: {os.getpid()}\n{code}"
        given = Path(os.devnull if stdin == subprocess.DEVNULL else f"/proc/{os.getpid()}/fd/{stdin or 0}")
        reader, output = multiprocessing.Pipe(duplex=False)
        arguments = (code, ["-c", *words], output, output, Path.cwd(), env, resource.RLIM_INFINITY, given)
        self.process = FORKED.Process(target=become, args=arguments)
        self.process.start()
        output.close()
        self.stdout = open(os.dup(reader.fileno()), encoding="utf-8")  # noqa: PTH123, SIM115  (a descriptor; __exit__ closes it)

    def __enter__(self) -> ForkedCommand:
        return self

    def __exit__(self, *error: object) -> None:
        self.stdout.close()
        self.process.join()
        self.returncode = self.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def wait(self, timeout: float | None = None) -> None:
        self.process.join(timeout)

    def kill(self) -> None:
        self.process.kill()


def fork_commands_of_own_data() -> None:
    """Let own-data, in this process of `FORKED`, start fairseq's commands in further processes of the same server."""
    forkserver._forkserver.ensure_running = lambda: None  # it would start another server
    from fairseq_plugins.cli import processes  # noqa: PLC0415  (the server must not import the plugin)

    processes.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": ForkedCommand})


def run_own_data(*words: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run own-data and its commands in forked processes."""
    code = f"from tests.commands import fork_commands_of_own_data as fork; fork(); {MAIN}"
    return python("-c", code, "own-data", *words, stdin=stdin)


def run(
    command: str,
    *arguments: object,
    cwd: Path = ROOT,
    stdin: str | bytes = b"",
    succeeds: bool = True,
    path: Path | str = "",
    fork: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run one of fairseq's commands (``train``, ``generate``, ...) in its own process.

    The process is forked from `FORKED`, unless ``fork`` is false or ``path``, a PYTHONPATH, is given.
    """
    words = [*map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(path)}
    given = stdin.encode() if isinstance(stdin, str) else stdin
    if path or not fork:
        command_line = [sys.executable, "-W", "ignore", "-m", f"fairseq_cli.{command}", *words]
        result = started(command_line, cwd, environment, given)
    else:
        result = forked(call(command), [f"fairseq-{command}", *words], cwd, environment, given)
    if succeeds and result.returncode:
        raise AssertionError(f"fairseq-{command} failed:\n{result.stdout[-2000:]}\n{result.stderr[-6000:]}")
    if not succeeds and not result.returncode:
        raise AssertionError(f"fairseq-{command} did not fail:\n{result.stdout[-2000:]}")
    return result


def train(data: Path, save: Path, *options: object, arch: str = "convs2s") -> subprocess.CompletedProcess[str]:
    """Train a small model."""
    command = [data, "--user-dir", USER_DIR, "--arch", arch, *MODEL, *SIZES, *TRAINING, *QUIET, "--save-dir", save]
    return run("train", *command, *options)


def python(*arguments: object, stdin: str = "", fork: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a script, or a program with ``-c``, with the plugin of this tree.

    A program's process is forked from `FORKED`, unless ``fork`` is false.
    """
    words = [*map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if fork and words[0] == "-c":
        return forked(words[1], ["-c", *words[2:]], ROOT, environment, stdin.encode())
    return started([sys.executable, "-W", "ignore", *words], ROOT, environment, stdin.encode())


def script(path: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Run a script of the examples in this process, which has imported fairseq."""
    output, errors, status = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output), redirect_stderr(errors):
        patch.setattr(sys, "argv", [str(path), *map(str, words)])
        patch.syspath_prepend(path.parent)
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
            print(end.code if isinstance(end.code, str) else "", file=errors)
    return subprocess.CompletedProcess(words, status, output.getvalue(), errors.getvalue())


def make_data(folder: Path) -> Path:
    """Write a small corpus whose targets are reversed sources, binarise it, and return the folder of binary data."""
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


def keep_the_model(path: Path, *arguments: Any) -> None:
    """Run `become`, and save the model's parameters at the end of training."""
    made, init = [], trainer.Trainer.__init__

    def keep(self: trainer.Trainer, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        made.append(self)

    trainer.Trainer.__init__ = keep
    become(*arguments)
    torch.save(made[0].get_model().state_dict(), path)


def one_of_two(folder: Path) -> list[str]:
    """Return fairseq-train's options for each of two processes that are started by hand, without the rank."""
    place = f"file://{tempfile.mkdtemp(dir=folder)}/store"  # a port that is free now may be taken later
    words = ["--distributed-world-size", "2", "--distributed-backend", "gloo", "--distributed-no-spawn"]
    return [*words, "--distributed-init-method", place, "--distributed-rank"]


def shown(output: str, part: str) -> list[dict[str, Any]]:
    """Return the JSON records of a log, for any format of logger names."""
    pattern = rf'\b{part}\b\W+(?:INFO\W+)?(\{{".*\}})$'
    return [json.loads(found) for found in re.findall(pattern, output, re.MULTILINE)]


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Limit the size of files, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def train_two_processes_as_one(
    folder: Path, *options: object, backend: str = "legacy_ddp"
) -> tuple[str, str, dict[str, torch.Tensor]]:
    """Train with two processes, and with one process and twice the update frequency; check that parameters are equal.

    Returns the outputs of the first of the two processes and of the single process, and the parameters.
    """
    parallel = ["--ddp-backend", backend, *one_of_two(folder)]
    processes = []
    for number, more in enumerate([[*parallel, 0], [*parallel, 1], ["--update-freq", 2]]):
        words = [*map(str, [*options, "--save-dir", folder / f"save{number == 2}", *more])]
        log = folder / f"{number}.log"
        arguments = (call("train"), ["fairseq-train", *words], log, log, ROOT, {**os.environ})
        processes.append(FORKED.Process(target=keep_the_model, args=(folder / f"{number}.pt", *arguments), daemon=True))
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    outputs = [(folder / f"{number}.log").read_text() for number in range(3)]
    for process, output in zip(processes, outputs, strict=True):
        assert process.exitcode == 0, output[-4000:]
    first, second, single = (torch.load(folder / f"{number}.pt") for number in range(3))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
        torch.testing.assert_close(value, single[name], rtol=1e-4, atol=1e-5)
    return outputs[0], outputs[2], first


def save_model(model: torch.nn.Module, args: Namespace, path: Path) -> Path:
    """Save a checkpoint of a model that was built with these options, in the format of fairseq's trainer."""
    history = [{"num_updates": 1, "optimizer_name": "adam", "lr_scheduler_state": {}, "criterion_name": "x"}]
    torch.save({"args": args, "model": model.state_dict(), "optimizer_history": history, "extra_state": {}}, path)
    return path


def own_user_dir(folder: Path) -> Path:
    """Write a user directory that registers an architecture, ``convs2s_of_mine``."""
    mine = folder / "a_user_dir_of_mine"
    mine.mkdir()
    (mine / "__init__.py").write_text(
        "import fairseq_plugins\n"
        "from fairseq_plugins.common.options import register_presets\n"
        "from fairseq_plugins.convs2s.config import ConvS2SConfig\n"
        "fairseq_plugins.install()\n"
        "register_presets('convs2s', ConvS2SConfig, {'convs2s_of_mine': {}})\n"
    )
    return mine


def load_checkpoint(path: Path) -> dict[str, Any]:
    return checkpoint_utils.load_checkpoint_to_cpu(str(path))


def hypotheses(output: str) -> dict[int, list[tuple[float, str]]]:
    """Return the scores and tokens of fairseq-generate's hypotheses for each sentence."""
    found: dict[int, list[tuple[float, str]]] = {}
    for line in output.splitlines():
        if line.startswith("H-"):
            name, score, text = line.split("\t")
            found.setdefault(int(name[2:]), []).append((float(score), text))
    return found
