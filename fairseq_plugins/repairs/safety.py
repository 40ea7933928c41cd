"""No option, file name or archive runs code, reads the environment, or writes outside its folder.

`fairseq_plugins.repairs.checkpoints` does the same for checkpoints.
"""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any, NoReturn

from fairseq import file_utils
from fairseq.data import FastaDataset
from fairseq.dataclass import utils as dataclass_utils

from fairseq_plugins.common.options import flag, literal
from fairseq_plugins.repairs.checkpoints import reference_in
from fairseq_plugins.repairs.wrapping import mentions, wrap

FAIRSEQ = ("fairseq", "fairseq_cli")
MOST_MEMBERS = 10_000  # members of an archive; fairseq's archives have about ten
LONGEST_NAME = 255  # bytes; the limit of a plain tar archive


def refuse_to_run(code: object, *_: object) -> NoReturn:
    """Raise an error; replaces `exec`."""
    raise ValueError(f"code {str(code)[:100]!r} was not run: files and options must not contain code; remove it")


def read_literals(module: ModuleType) -> None:
    """Replace ``eval`` by `literal` and ``exec`` by an error, except in a module that defines its own (the probe)."""
    names = vars(module)
    for builtin, replacement in ((eval, literal), (exec, refuse_to_run)):
        if names.get(builtin.__name__, builtin) is builtin:
            names[builtin.__name__] = replacement


class FairseqFinder(PathFinder):
    """Find modules of fairseq that are imported later, and replace their ``eval`` before they run."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return None for modules outside fairseq, which Python's other finders then find."""
        if fullname.partition(".")[0] not in FAIRSEQ:
            return None
        spec = super().find_spec(fullname, path, target)
        if spec and spec.loader:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                read_literals(module)
                run(module)

            vars(spec.loader)["exec_module"] = exec_module
        return spec


def read_options_without_eval() -> None:
    """Parse options as literals in all modules of fairseq; fairseq evaluates them as Python code.

    Some options come from a checkpoint: ``--encoder-layers`` of its model, ``wer_args`` of its criterion ctc.
    """
    for module in list(sys.modules.values()):
        # A command that is started by `python -m` is called __main__, but still has its package's name.
        if isinstance(module, ModuleType) and str(vars(module).get("__package__")).partition(".")[0] in FAIRSEQ:
            read_literals(module)
    sys.meta_path.insert(0, FairseqFinder)


def refuse_references() -> None:
    """Refuse ``${...}`` in options; omegaconf would insert the value of another option or environment variable.

    Some of fairseq's own defaults are references; they are not checked.  No probe is needed: other options are read as
    before.
    """
    read = dataclass_utils.override_module_args

    @wrap(dataclass_utils, "override_module_args")
    def override_module_args(args: Any) -> Any:
        options = {name if name == "data" else flag(name): value for name, value in vars(args).items()}
        if found := reference_in(options):
            raise ValueError(f"{found}; give the value itself")
        return read(args)


def quote_file_names() -> None:
    """Quote file names in the shell commands that read the files of ``--dataset-impl fasta``."""
    build = getattr(FastaDataset, "_build_index", None)
    if build is None or not mentions(build, "subprocess"):  # the probe: whether fairseq runs a shell command
        return

    @wrap(FastaDataset, "_build_index")
    def build_index(self: Any, path: str) -> Any:
        return build(self, shlex.quote(path))


def unpack_archives_safely() -> None:
    """Unpack archives of ``from_pretrained`` safely into a folder beside them, and name a missing file.

    With fairseq, an archive can overwrite any file of the user.  fairseq deletes the archive before its folder is
    complete, and reports a missing file too late.
    """
    load = file_utils.load_archive_file
    if not mentions(load, "extractall"):  # the probe: whether an archive can choose any path
        return

    @wrap(file_utils, "load_archive_file")
    def load_archive_file(archive_file: str) -> str:
        try:
            path = Path(file_utils.cached_path(archive_file))
        except OSError as error:
            raise FileNotFoundError(
                f"{archive_file!r} is not a folder, archive or known model; check the path: {error}"
            ) from error
        if path.is_dir():
            return str(load(str(path)))
        try:
            return str(unpacked(path))
        except Exception as error:  # damaged archives raise almost any error
            raise OSError(
                f"{path} cannot be unpacked: {error}; download it again, or pack only plain files, each once and "
                "with a relative path"
            ) from error


def unpacked(archive: Path) -> Path:
    """Return the folder beside an archive that contains its files, and unpack them first if necessary.

    The folder gets its name only when it is complete, so that a killed process or a full disk leaves no incomplete
    folder. Another archive of the same name gets another folder.
    """
    about = archive.stat()
    folder = archive.with_name(f"{archive.name}.unpacked-{about.st_mtime_ns:x}-{about.st_size:x}")
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory(dir=archive.parent, prefix=f".{archive.name}.") as workplace:
        unfinished = Path(workplace, "archive")
        unpack(archive, unfinished)
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process has created it
                raise
    return folder


def unpack(archive: Path, folder: Path) -> None:
    """Write the files of an archive to a new folder, without the parent folders that all files share.

    The archive cannot choose a place outside the folder: its paths are relative and have no ``..``, and no link is
    created.  Files have the user's default permissions.

    Raises:
        tarfile.TarError: the archive is empty, or a member is not a file or folder below ``folder``.
        OSError: a member occurs twice, or as a file and as a folder.
    """
    with tarfile.open(archive) as file:
        members = list(itertools.islice(file, MOST_MEMBERS + 1))
        if not 1 <= len(members) <= MOST_MEMBERS:
            problem = f"has more than {MOST_MEMBERS} files" if members else "is empty"
            raise tarfile.ReadError(f"the archive {problem}")
        paths = [path_of(member) for member in members]
        folders = [path if each.isdir() else path.parent for each, path in zip(members, paths, strict=True)]
        common = os.path.commonpath(folders)
        folder.mkdir()
        for member, path in zip(members, paths, strict=True):
            place = folder / path.relative_to(common)
            if member.isdir():
                place.mkdir(parents=True, exist_ok=True)
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            with place.open("xb") as output:
                shutil.copyfileobj(file.extractfile(member), output)  # type: ignore[arg-type]


def path_of(member: tarfile.TarInfo) -> PurePosixPath:
    """Return the path of a member.

    Raises:
        tarfile.ReadError: the member is a link, device or sparse file, or its path may lead out of the folder.
    """
    name = member.name[:LONGEST_NAME]
    if not (member.isdir() or (member.isreg() and not member.issparse() and member.size >= 0)):
        raise tarfile.ReadError(f"{name!r} is a link, a device or another special file")
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or len(os.fsencode(member.name)) > LONGEST_NAME:
        raise tarfile.ReadError(f"{name!r} is absolute, contains '..' or is longer than {LONGEST_NAME} bytes")
    if member.isreg() and not path.parts:
        raise tarfile.ReadError("the archive has a file without a name")
    return path
