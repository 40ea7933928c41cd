"""Archives that are given to ``from_pretrained``: nothing of the user's is written over, moved, or lost."""

from __future__ import annotations

import errno
import io
import os
import signal
import tarfile
import tempfile
from pathlib import Path

import pytest
from fairseq import file_utils

from fairseq_plugins.repairs import archives


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


def attributed(name: str, **attributes: object) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    for attribute, value in attributes.items():
        setattr(member, attribute, value)
    return member


@pytest.mark.parametrize(
    "members",
    [
        ["../model.pt"],
        ["a/../../model.pt"],
        ["//home/model.pt"],
        [link("model/last.pt", "model.pt")],
        [link("model/up", "..")],
        [link("model/up", "/home")],
        [link("model/last.pt", "model/model.pt", tarfile.LNKTYPE)],
        [link("model/up", "../home", tarfile.LNKTYPE)],
        [link("model/pipe", kind=tarfile.FIFOTYPE)],
        [link("model/null", kind=tarfile.CHRTYPE)],
        [link("model/disk", kind=tarfile.BLKTYPE)],
        [link("model/unknown", kind=b"V")],
        ["model/model.pt"],  # twice
        ["model/a", folder("model/a")],
        [folder("model/a"), "model/a"],
        ["model/a", "model/a/b"],
        ["model/a/b", "model/a"],
        ["a" * 256],
        ["a/" * 128 + "model.pt"],
        [attributed("model/a", pax_headers={"size": "-2048"})],  # leads back to an earlier member, without end
        [attributed("model/a", pax_headers={"path": "model/a\0b"})],
        [attributed("model/a", pax_headers={"GNU.sparse.size": "1000000000000", "GNU.sparse.map": "0,0"})],
        [f"model/{number}" for number in range(archives.MOST)],
    ],
    ids=lambda members: getattr(members[0], "name", members[0])[:20],
)
def test_what_is_no_plain_file_of_its_own_is_refused(members: list[str | tarfile.TarInfo], tmp_path: Path) -> None:
    path = make(tmp_path / "evil.tar", "model/model.pt", *members)
    with pytest.raises(OSError, match=r"evil\.tar cannot be unpacked: "):
        unpacked(path)
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("top", ["", "model/"])
@pytest.mark.parametrize("end", ["link", "hard link"])
def test_links_that_no_path_resolves(top: str, end: str, tmp_path: Path) -> None:
    """Python's own filter follows links until a path is too long for the system, and takes the rest as it is."""
    victim = tmp_path / "home" / "program"
    victim.parent.mkdir()
    victim.write_text("mine")
    members, real, short = [], top, top
    for letter in "abcdefghijklmnop":
        long = letter * 247
        members += [folder(f"{real}{long}"), link(f"{real}{letter}", long)]
        real, short = f"{real}{long}/", f"{short}{letter}/"
    up = f"{short}{'l' * 254}"
    members += [link(up, "../" * 16), link(f"{top}escape", f"{up}/../../home".removeprefix(top))]
    if end == "hard link":
        members.append(link(f"{top}escaped", f"{top}escape/program", tarfile.LNKTYPE))
    names = [f"{top}escaped"] if end == "hard link" else [f"{top}escape/program", f"{top}escape/created"]
    path = tmp_path / "evil.tar"
    with tarfile.open(path, "w") as archive:
        for member in [*members, *(attributed(name, size=6) for name in names)]:
            archive.addfile(member, io.BytesIO(b"theirs"))
    with pytest.raises(OSError, match=r"evil\.tar cannot be unpacked: "):
        file_utils.load_archive_file(str(path))
    assert victim.read_text() == "mine"
    assert sorted(tmp_path.iterdir()) == [path, victim.parent]
    assert [*victim.parent.iterdir()] == [victim]


def test_modes_are_not_those_of_the_archive(tmp_path: Path) -> None:
    members = [attributed(f"model/{mode:o}", mode=mode) for mode in (0o6777, 0o000)]
    for file in unpacked(make(tmp_path / "model.tar", *members)).values():
        assert file.stat().st_mode & 0o7133 == 0
        assert os.access(file, os.R_OK | os.W_OK)


def test_an_archive_takes_no_folder_away(tmp_path: Path) -> None:
    """fairseq moves to the archive's place what all of its names begin with."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").touch()
    path = make(tmp_path / "evil.tar", folder(f"{tmp_path}/home"), f"{tmp_path}/home/model.pt")
    with pytest.raises(OSError, match="is absolute"):
        unpacked(path)
    assert (tmp_path / "home" / "thesis.txt").exists()


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
