"""What is written takes a place whole, or the place stays as it was."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from fairseq_plugins.tools import cli
from fairseq_plugins.tools.parallel_text import writing
from tests.commands import full_disk
from tests.tools.test_export_nbest import GENERATED
from tests.tools.test_plot_loss import log, valid


@pytest.mark.parametrize("name", ["picture.png", "picture.svg", "picture.pdf", "list"])
def test_a_full_disk_leaves_what_was_there(name: str, tmp_path: Path) -> None:
    if name == "list":
        (tmp_path / "generated").write_text(GENERATED, encoding="utf-8")
        words = ["export-nbest", str(tmp_path / "generated")]
    else:
        pytest.importorskip("matplotlib.font_manager")  # which writes a list of fonts the first time
        words = ["plot-loss", str(log(tmp_path / "log", valid(1, 6), valid(2, 5)))]
    output = tmp_path / name
    output.write_text("good")
    output.chmod(0o640)
    before = sorted(tmp_path.iterdir())
    with full_disk(100), pytest.raises(SystemExit, match=f"{name} was not written: "):
        cli.main([*words, "--output", str(output)])
    assert output.read_text() == "good"
    assert sorted(tmp_path.iterdir()) == before
    cli.main([*words, "--output", str(output)])
    assert output.stat().st_size > 100
    assert stat.S_IMODE(output.stat().st_mode) == 0o640
    assert sorted(tmp_path.iterdir()) == before


def test_what_is_no_plain_file_is_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDWR | os.O_NONBLOCK)
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for name in ("pipe", "link"):
        with writing(tmp_path / name) as file:
            file.write(name)
    assert os.read(reader, 9) == b"pipe"
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert (tmp_path / "file").read_text() == "link"
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("command", ["plot-attention", "plot-branches", "plot-loss"])
def test_a_picture_needs_an_ending(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without one matplotlib would write, or write over, another file."""
    with pytest.raises(SystemExit):
        cli.main([command, "x", "--output", str(tmp_path / "foo")])
    assert "foo does not end in .png, .pdf or .svg" in capsys.readouterr().err
