"""Archives that are given to ``from_pretrained``: nothing of the user's is written over, moved, or lost."""

from __future__ import annotations

import errno
import os
import signal
import tarfile
import tempfile
from pathlib import Path

import pytest
from fairseq import file_utils

from fairseq_plugins.compat import archives


def make(path: Path, *members: str | tarfile.TarInfo) -> Path:
    with tarfile.open(path, f"w:{'gz' if path.suffix == '.gz' else ''}") as archive:
        for member in members:
            archive.addfile(tarfile.TarInfo(member) if isinstance(member, str) else member)
    return path


def link(name: str, target: str = "", kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


def folder(name: str) -> tarfile.TarInfo:
    return link(name, kind=tarfile.DIRTYPE)


def unpacked(path: Path) -> dict[str, Path]:
    """What the folder of an archive holds; the archive itself is still there."""
    before = path.read_bytes()
    found = Path(file_utils.load_archive_file(str(path)))
    assert path.read_bytes() == before
    return {each.name: each for each in found.iterdir()}


def test_it_is_unpacked_once_and_stays(tmp_path: Path) -> None:
    path = make(tmp_path / "model.tar", "model/model.pt", "model/other.pt")
    found = unpacked(path)
    assert sorted(found) == ["model.pt", "other.pt"]
    found["model.pt"].write_text("mine")
    assert unpacked(path)["model.pt"].read_text() == "mine"
    assert sorted(unpacked(make(tmp_path / "model.tar", *"abcdefghijklmnopqrstu"))) == [*"abcdefghijklmnopqrstu"]
    assert found["model.pt"].read_text() == "mine"


@pytest.mark.parametrize(
    "member",
    [
        "../model.pt",
        "//home/model.pt",
        link("model/up", ".."),
        link("model/up", "../../home"),
        link("model/up", "/home"),
        link("model/up", "../home", tarfile.LNKTYPE),
    ],
)
def test_what_would_be_elsewhere_is_refused(member: str | tarfile.TarInfo, tmp_path: Path) -> None:
    path = make(tmp_path / "evil.tar", "model/model.pt", member)
    with pytest.raises(tarfile.FilterError):
        unpacked(path)
    assert [*tmp_path.iterdir()] == [path]


def test_an_archive_takes_no_folder_away(tmp_path: Path) -> None:
    """fairseq moves to the archive's place what all of its names begin with."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").touch()
    path = make(tmp_path / "evil.tar", folder(f"{tmp_path}/home"), f"{tmp_path}/home/model.pt")
    with pytest.raises(tarfile.OutsideDestinationError):
        unpacked(path)
    assert (tmp_path / "home" / "thesis.txt").exists()


def test_links_that_stay_inside(tmp_path: Path) -> None:
    links = [link("model/last.pt", "model/a.pt", tarfile.LNKTYPE), link("model/best.pt", "a.pt")]
    found = unpacked(make(tmp_path / "model.tar", "model/a.pt", *links))
    assert found["last.pt"].samefile(found["a.pt"])
    assert found["best.pt"].samefile(found["a.pt"])


@pytest.mark.parametrize("names", [["best.pt", "code"], ["./best.pt"], ["best.pt"], ["model/ab", "model/ac"]])
def test_an_archive_without_a_folder_of_its_own(names: list[str], tmp_path: Path) -> None:
    """fairseq takes the letters that all names begin with for a folder, once it has removed the archive."""
    path = make(tmp_path / "model.tar", *([folder(".")] if names[0].startswith(".") else []), *names)
    assert sorted(unpacked(path)) == [Path(name).name for name in names]


@pytest.mark.parametrize("kind", ["empty", "text", "cut"])
def test_what_cannot_be_unpacked_is_named_and_kept(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.tar.gz"
    if kind == "text":
        path.write_text("words")
    else:
        make(path, *([] if kind == "empty" else ["model/model.pt"]))
    if kind == "cut":
        os.truncate(path, path.stat().st_size - 20)
    before = path.read_bytes()
    with pytest.raises(OSError, match=f"{path} cannot be unpacked: "):
        file_utils.load_archive_file(str(path))
    assert path.read_bytes() == before
    assert [*tmp_path.iterdir()] == [path]


def test_half_a_folder_is_never_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed once that files are written; and another process is faster."""
    path, unpack = make(tmp_path / "model.tar", "model/model.pt"), archives.unpack

    def unpack_and_die(*args: Path) -> None:
        unpack(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(archives, "unpack", unpack_and_die)
    child = os.fork()
    if not child:
        try:
            file_utils.load_archive_file(str(path))
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    monkeypatch.undo()
    assert [*tmp_path.glob("[!.]*")] == [path]

    def unpack_while_another_does(*args: Path) -> None:
        monkeypatch.undo()
        unpack(*args)
        assert sorted(unpacked(path)) == ["model.pt"]

    monkeypatch.setattr(archives, "unpack", unpack_while_another_does)
    assert sorted(unpacked(path)) == ["model.pt"]
    assert len([*tmp_path.glob("[!.]*")]) == 2


def test_in_a_folder_that_nobody_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, make_folder = make(tmp_path / "model.tar", "model/model.pt"), tempfile.mkdtemp

    def refuse(*args: str, **kwargs: str) -> str:
        if tmp_path in (*args, *kwargs.values()):
            raise OSError(errno.EROFS, "Read-only file system")
        return make_folder(*args, **kwargs)

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    assert sorted(unpacked(path)) == ["model.pt"]
    assert [*tmp_path.iterdir()] == [path]
