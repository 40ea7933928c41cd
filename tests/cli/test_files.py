"""Files that commands read and write: errors name them, and outputs are replaced completely or not at all."""

from __future__ import annotations

import copy
import multiprocessing
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq_plugins.cli.parallel_text import writing
from tests.cli.conftest import refused, tool
from tests.cli.test_plots import log, valid
from tests.commands import full_disk


@pytest.mark.parametrize("part", ["parameters", "task", "model", "cfg", "optimizer_history"])
def test_pictures_of_odd_checkpoints(part: str, state: dict[str, Any], data: Path, tmp_path: Path) -> None:
    """The parameters are no numbers, a name is unknown, or a part is empty."""
    odd = copy.deepcopy(state)
    if part == "parameters":
        odd["model"] = {name: torch.full_like(value, torch.nan) for name, value in odd["model"].items()}
    elif part in odd["cfg"]:
        odd["cfg"][part] = {"_name": "odd"}
    else:
        odd[part] = {}
    torch.save(odd, tmp_path / "odd.pt")
    sentence, picture = ["--path", tmp_path / "odd.pt", "--input", "w1 w2"], ["--output", tmp_path / "picture.svg"]
    assert "plot-attention: error: " in refused("plot-attention", data, *sentence, *picture)
    assert "odd.pt" in refused("plot-branches", tmp_path / "odd.pt", *picture)


@pytest.mark.parametrize("name", ["picture.png", "picture.svg", "picture.pdf"])
def test_a_full_disk_leaves_the_old_file(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib.font_manager")  # matplotlib writes a list of fonts on first use
    output = tmp_path / name
    words = ["plot-loss", log(tmp_path / "log", valid(1, 6), valid(2, 5)), "--output", output]
    output.write_text("good")
    output.chmod(0o640)
    before = sorted(tmp_path.iterdir())
    with full_disk(100):
        assert name in refused(*words)
    assert output.read_text() == "good"
    assert sorted(tmp_path.iterdir()) == before
    tool(*words)
    assert output.stat().st_size > 100
    assert stat.S_IMODE(output.stat().st_mode) == 0o640
    assert sorted(tmp_path.iterdir()) == before


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDWR | os.O_NONBLOCK)
    write(tmp_path / "pipe", "text")
    assert os.read(reader, 9) == b"text"
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


@pytest.mark.parametrize("command", ["plot-attention", "plot-branches", "plot-loss"])
def test_a_plot_needs_a_file_suffix(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(command, "x", "--output", "foo.jpg")
    assert "foo.jpg" in capsys.readouterr().err


def test_two_writers_of_one_file(tmp_path: Path) -> None:
    """Two concurrent writers both write complete files, and the file of the last writer remains."""
    path = tmp_path / "list"
    with writing(path) as mine:
        mine.write("first\n")
        other = multiprocessing.get_context("fork").Process(target=write, args=(path, "second\n"))
        other.start()
        other.join()
        assert other.exitcode == 0
        assert path.read_text() == "second\n"
    assert path.read_text() == "first\n"
    assert list(tmp_path.iterdir()) == [path]


def write(path: Path, text: str) -> None:
    with writing(path) as file:
        file.write(text)


def test_links_stay_and_their_files_are_replaced_whole(tmp_path: Path) -> None:
    """The target of a link is replaced; a hard link to the file keeps the old content."""
    (tmp_path / "file").write_text("old")
    (tmp_path / "hard").hardlink_to(tmp_path / "file")
    for name, target in (("link", "file"), ("dangling", "new"), ("round", "round")):
        (tmp_path / name).symlink_to(target)
    with full_disk(2), pytest.raises(OSError, match="link"):
        write(tmp_path / "link", "half")
    assert (tmp_path / "file").read_text() == "old"
    for name, target in (("link", "file"), ("dangling", "new")):
        write(tmp_path / name, name)
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / target).read_text() == name
    assert (tmp_path / "hard").read_text() == "old"
    with pytest.raises(OSError, match="round"):
        write(tmp_path / "round", "text")


@pytest.mark.parametrize("name", ["read-only", "folder", "missing-target"])
def test_unwritable_files_are_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "read-only").touch(0o400)
    (tmp_path / "folder").mkdir()
    (tmp_path / "missing-target").symlink_to(tmp_path / "nowhere" / "file")
    monkeypatch.setattr(os, "access", lambda path, mode: path.stat().st_mode & 0o200)  # root may write everywhere
    before = sorted(tmp_path.iterdir())
    with pytest.raises(OSError, match=name):
        write(tmp_path / name, "text")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["log.svg", "link.svg", "hard.svg"])
def test_an_input_file_is_not_overwritten(name: str, tmp_path: Path) -> None:
    read = log(tmp_path / "log.svg", valid(1, 6))
    before = read.read_text()
    (tmp_path / "link.svg").symlink_to(read)
    (tmp_path / "hard.svg").hardlink_to(read)
    assert name in refused("plot-loss", "--run", "a", read, "--output", tmp_path / name)
    assert read.read_text() == before
