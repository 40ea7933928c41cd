"""Long jobs and fairseq's commands: stopping, resuming, locking, and files of the working folder."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch

from fairseq_plugins.cli import processes
from fairseq_plugins.cli.processes import fairseq, fairseq_lines, running, stoppable
from fairseq_plugins.common.files import work_in
from tests.cli.conftest import refused
from tests.commands import MAIN, ROOT, USER_DIR
from tests.repairs.payloads import code
from tests.repairs.trainings import options, updates

SLEEPER = """
import sys
from pathlib import Path
from fairseq_plugins.cli.processes import running
from fairseq_plugins.common.files import work_in
with work_in(Path(sys.argv[1])), running(["sleep", "60"]) as child:
    print(child.pid, flush=True)
    child.wait()
"""


def own_data(folder: Path, out: str = "out") -> list[str]:
    """Write a small text, and return the words of a command that trains with it."""
    paths = [folder / "text.en", folder / "text.de"]
    for path in paths:
        path.write_text("".join(f"{path.suffix} {number} {number % 7} .\n" for number in range(60)))
    return ["own-data", *map(str, paths), str(folder / out)]


def is_there(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # even if it disappears between opening and reading
        return False
    return "Z" not in state.rpartition(")")[2].split()[0]


def wait_for_the_end(process: int) -> None:
    """Wait until all threads of a process have ended; only then are its files closed."""
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        return
    ended, *_ = select.select([descriptor], [], [], 5)
    os.close(descriptor)
    assert ended, f"{process} is still there"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_all_started_processes(number: signal.Signals, tmp_path: Path) -> None:
    """The command is one of fairseq's; a shell sees the signal, and users see no traceback."""
    heeded = f"import signal; signal.signal({number.value}, signal.SIG_DFL)"  # even if it was ignored, as under nohup
    command = [sys.executable, "-c", f"{heeded}; {MAIN}", *own_data(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        shown = []
        for line in process.stderr:
            shown.append(line)
            if line.startswith("$ fairseq-preprocess"):
                break
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not children.read_text():
            time.sleep(0.001)
        (child,) = map(int, children.read_text().split())
        process.send_signal(number)
        rest = process.stderr.read()
    assert not is_there(child)
    assert process.returncode == -number
    assert "Traceback" not in rest
    assert rest.endswith("\nfairseq-plugins: stopped\n")
    with work_in(tmp_path / "out"):
        pass


def test_a_killed_command_leaves_no_training(tmp_path: Path) -> None:
    """The same command can resume at once."""
    tiny = "--encoder-layers '[(16, 3)]' --decoder-layers '[(16, 3)]' --num-workers 0 --patience 0"
    words = [*own_data(tmp_path), "--arch", "convs2s_tiny", "--train", tiny]
    with subprocess.Popen([sys.executable, "-c", MAIN, *words], cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if line.startswith("epoch 2"):
                break
        (child,) = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        process.kill()
    wait_for_the_end(child)
    with work_in(tmp_path / "out"):
        pass


def test_a_signal_during_the_start_of_a_process(tmp_path: Path) -> None:
    def before_it_is_another_program() -> None:
        (tmp_path / "child").write_text(str(os.getpid()))
        os.kill(os.getppid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), running(["sleep", "60"], preexec_fn=before_it_is_another_program):
            raise AssertionError("this process has been stopped")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not is_there(int((tmp_path / "child").read_text()))


def test_ignored_signals_stay_ignored() -> None:
    """Under nohup, for example, a signal is ignored and must stay ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN), signal.getsignal(signal.SIGTERM)
    with stoppable():
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is not before[1]
    assert (signal.signal(signal.SIGHUP, before[0]), signal.getsignal(signal.SIGTERM)) == (signal.SIG_IGN, before[1])


@pytest.mark.parametrize(("trap", "end"), [("", signal.SIGINT), ("trap '' INT; ", signal.SIGKILL)])
def test_an_error_stops_all_started_processes(trap: str, end: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE", 0.1 if trap else 60)
    call = ["bash", "-c", f"{trap}echo begun; exec sleep 60"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # even if it is ignored, as for a background job
    try:
        with pytest.raises(ValueError, match="begun"), running(call, stdout=subprocess.PIPE) as child:
            raise ValueError(child.stdout.readline())
    finally:
        signal.signal(signal.SIGINT, before)
    assert child.returncode == -end


def test_two_jobs_in_a_folder_are_refused(tmp_path: Path) -> None:
    """The children of a killed process keep the lock until they end."""
    with (
        work_in(tmp_path / "a"),
        work_in(tmp_path / "b"),
        pytest.raises(ValueError, match="/a "),
        work_in(tmp_path / "a"),
    ):
        pass
    command = [sys.executable, "-c", SLEEPER, str(tmp_path / "a")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        child = int(process.stdout.readline())
        assert f"{tmp_path}/a " in refused(*own_data(tmp_path, "a"))
        process.kill()
    with pytest.raises(ValueError, match="/a "), work_in(tmp_path / "a"):
        pass
    os.kill(child, signal.SIGKILL)
    wait_for_the_end(child)
    with work_in(tmp_path / "a"):
        pass


def test_python_files_of_the_working_folder_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = tmp_path / "trace"
    for name in ("sacrebleu", "runpy", "numpy", "fairseq_cli", "torch", "argparse"):
        (tmp_path / f"{name}.py").write_text(code(trace))
    (tmp_path / "text").write_text("words\n")
    monkeypatch.chdir(tmp_path)
    lines = list(fairseq_lines("score", "--sys", "text", "--ref", "text"))
    assert any("BLEU4 = " in line for line in lines)
    assert not trace.exists()


def test_the_end_of_a_failed_commands_output_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"(?s)fairseq-score.*AssertionError"):
        fairseq("score", "--ref", "text")
    assert capsys.readouterr().out == ""


def test_a_training_with_checkpoints_at_time_intervals(data: Path, tmp_path: Path) -> None:
    """A training that is stopped within an epoch resumes there, and ends like an uninterrupted training."""

    def words(updates: int, save: Path) -> list[object]:
        more = ["--user-dir", USER_DIR, "--log-interval", 1, "--log-format", "json", "--save-interval-updates", 0]
        return [*options(data, updates), *more, "--save-dir", save]

    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    before = "from fairseq_plugins.repairs.saving import save_every; save_every(0)"
    with closing(fairseq_lines("train", *words(100_000, stopped), before=before)) as lines:
        for line in lines:
            assert "valid_loss" not in line, "it validates at the ends of epochs only"
            if "train_inner" in line and '"num_updates": "5"' in line:
                break
    done = updates(torch.load(stopped / "checkpoint_last.pt", weights_only=False))
    assert done > 3
    for save in (stopped, whole):
        for _ in fairseq_lines("train", *words(done + 4, save)):
            pass
    states = [torch.load(save / "checkpoint_last.pt", weights_only=False)["model"] for save in (stopped, whole)]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
