"""No option, file name or archive runs code or writes outside its folder."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import fairseq
import fairseq_cli
import pytest
from fairseq import file_utils

from fairseq_plugins.repairs import safety
from tests.commands import ROOT


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
    """Return the files in the folder of an archive, which itself stays."""
    before = path.read_bytes()
    found = Path(file_utils.load_archive_file(str(path)))
    assert path.read_bytes() == before
    return {each.name: each for each in found.iterdir()}


def test_an_archive_is_unpacked_once_and_stays(tmp_path: Path) -> None:
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
        [link("model/last.pt", "model.pt")],
        [link("model/up", "..")],
        [link("model/up", "/home")],
        [link("model/last.pt", "model/model.pt", tarfile.LNKTYPE)],
        [link("model/up", "../home", tarfile.LNKTYPE)],
        [link("model/pipe", kind=tarfile.FIFOTYPE)],
        [link("model/null", kind=tarfile.CHRTYPE)],
        [link("model/disk", kind=tarfile.BLKTYPE)],
        [link("model/unknown", kind=b"V")],
        [folder("model/a"), "model/a"],
        ["model/a", "model/a/b"],
        ["model/a/b", "model/a"],
        [attributed("model/a", pax_headers={"size": "-2048"})],  # leads back to an earlier member, endlessly
        [attributed("model/a", pax_headers={"path": "model/a\0b"})],
        [attributed("model/a", pax_headers={"GNU.sparse.size": "1000000000000", "GNU.sparse.map": "0,0"})],
        [f"model/{number}" for number in range(safety.MOST_MEMBERS)],
    ],
    ids=lambda members: getattr(members[0], "name", members[0])[:20],
)
def test_members_that_are_not_plain_files_are_refused(members: list[str | tarfile.TarInfo], tmp_path: Path) -> None:
    path = make(tmp_path / "evil.tar", "model/model.pt", *members)
    with pytest.raises(OSError, match=r"evil\.tar cannot be unpacked: "):
        unpacked(path)
    assert [*tmp_path.iterdir()] == [path]


def test_modes_are_not_those_of_the_archive(tmp_path: Path) -> None:
    members = [attributed(f"model/{mode:o}", mode=mode) for mode in (0o6777, 0o000)]
    for file in unpacked(make(tmp_path / "model.tar", *members)).values():
        assert file.stat().st_mode & 0o7133 == 0
        assert os.access(file, os.R_OK | os.W_OK)


@pytest.mark.parametrize("names", [["best.pt", "code"], ["./best.pt"], ["best.pt"], ["model/ab", "model/ac"]])
def test_an_archive_without_a_folder_of_its_own(names: list[str], tmp_path: Path) -> None:
    """fairseq uses a common prefix of letters as the folder, after it has removed the archive."""
    path = make(tmp_path / "model.tar", *([folder(".")] if names[0].startswith(".") else []), *names)
    assert sorted(unpacked(path)) == [Path(name).name for name in names]


@pytest.mark.parametrize("kind", ["empty", "text", "cut"])
def test_a_damaged_archive_is_named_and_kept(kind: str, tmp_path: Path) -> None:
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
    """A process is killed after it has written the files."""
    path, unpack = make(tmp_path / "model.tar", "model/model.pt"), safety.unpack

    def unpack_and_die(*args: Path) -> None:
        unpack(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(safety, "unpack", unpack_and_die)
    child = os.fork()
    if not child:
        try:
            file_utils.load_archive_file(str(path))
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    monkeypatch.undo()
    assert [*tmp_path.glob("[!.]*")] == [path]

    assert sorted(unpacked(path)) == ["model.pt"]


def evaluating_modules() -> Iterator[str]:
    """Yield the modules of the installed fairseq that call ``eval`` or ``exec``."""
    for package in (fairseq, fairseq_cli):
        root = Path(package.__file__).parent
        for path in sorted(root.rglob("*.py")):
            inside = path.relative_to(root.parent).with_suffix("")
            if inside.parts[:2] == ("fairseq", "examples"):
                continue  # separate programs, which import each other as `examples`
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
                    yield ".".join(inside.parts)
                    break


_LOOK_AT_MODULES = """
import importlib, sys
half = len(sys.argv) // 2
def load(names):
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            print(f"{name} is not there: {error}", file=sys.stderr)
load(sys.argv[1:half])
import fairseq_plugins
fairseq_plugins.install()
from fairseq_plugins.repairs.safety import literal, refuse_to_run
load(sys.argv[half:])
for name in sys.argv[1:]:
    if name in sys.modules:
        assert eval("eval, exec", vars(sys.modules[name])) == (literal, refuse_to_run), name
        print(name)
"""


def test_every_module_reads_literals_whenever_it_is_loaded() -> None:
    """Half of the modules are loaded before the plugin, unless fairseq has loaded them already, the others after it."""
    names = list(evaluating_modules())
    assert {"fairseq.criterions.ctc", "fairseq.data.audio.raw_audio_dataset", "fairseq_cli.validate"} <= set(names)
    command = [sys.executable, "-W", "ignore", "-c", _LOOK_AT_MODULES, *names[::2], *names[1::2]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    missing = {line.partition(" ")[0] for line in done.stderr.splitlines() if " is not there: " in line}
    assert {*done.stdout.split(), *missing} == set(names)
    assert len(missing) <= 2
