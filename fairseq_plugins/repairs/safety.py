"""Prevent options, file names and archives from running code, reading environment variables or writing elsewhere.

The module `fairseq_plugins.repairs.checkpoints` prevents checkpoints from running code.
"""

from __future__ import annotations

import shlex
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from fairseq import file_utils
from fairseq.data import FastaDataset
from fairseq.dataclass import utils as dataclass_utils

from fairseq_plugins.common.options import flag, literal
from fairseq_plugins.repairs.checkpoints import reference_in
from fairseq_plugins.repairs.wrapping import repair, wrap

FAIRSEQ = ("fairseq", "fairseq_cli")
MOST_MEMBERS = 10_000  # maximum number of members of an archive; fairseq's archives have about ten


def refuse_to_run(code: object, *_: object) -> NoReturn:
    """Raise an error instead of running code; this function replaces `exec`."""
    raise ValueError(f"code {str(code)[:100]!r} was not run: files and options must not contain code; remove it")


def read_literals(module: ModuleType) -> None:
    """In a module, replace ``eval`` by `literal`, and ``exec`` by a function that raises an error."""
    vars(module).update(eval=literal, exec=refuse_to_run)


class FairseqFinder(PathFinder):
    """Find modules of fairseq that are imported later, and replace ``eval`` in each module before it runs."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return None for modules outside fairseq; Python then asks its other finders for these modules."""
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


@repair
def read_options_without_eval() -> None:
    """Parse options as literals in all modules of fairseq; fairseq evaluates options as Python code.

    Some of these options are read from a checkpoint: for example, ``--encoder-layers`` of a model, or ``wer_args`` of
    the criterion ctc.
    """
    for module in list(sys.modules.values()):
        # A command that `python -m` starts has the module name __main__, but its __package__ is still fairseq_cli.
        if isinstance(module, ModuleType) and str(vars(module).get("__package__")).partition(".")[0] in FAIRSEQ:
            read_literals(module)
    sys.meta_path.insert(0, FairseqFinder)


@wrap(dataclass_utils, "override_module_args")
def refuse_references(read: Any, args: Any) -> Any:
    """Refuse ``${...}`` in options; omegaconf would insert the value of another option or environment variable.

    Some of fairseq's own defaults contain ``${...}``; these defaults are not checked.
    """
    options = {name if name == "data" else flag(name): value for name, value in vars(args).items()}
    if found := reference_in(options):
        raise ValueError(f"{found}; give the value itself")
    return read(args)


@wrap(FastaDataset, "_build_index")
def quote_file_names(build: Any, self: Any, path: str) -> Any:
    """Quote file names in the shell commands that read the files of ``--dataset-impl fasta``."""
    return build(self, shlex.quote(path))


@wrap(file_utils, "load_archive_file")
def unpack_archives_safely(load: Any, archive_file: str) -> str:
    """Unpack an archive for ``from_pretrained`` safely, into a folder beside it; errors name a missing file.

    With fairseq, an archive can overwrite any file of the user.  fairseq deletes the archive before all files are
    unpacked, and reports a missing file too late.
    """
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
            f"{path} cannot be unpacked: {error}; download it again, or pack only plain files with relative paths"
        ) from error


def unpacked(archive: Path) -> Path:
    """Return the folder with the unpacked files of an archive; unpack the archive first if necessary.

    The folder gets its final name only when all files are unpacked, so that a killed process or a full disk leaves no
    incomplete folder.  Another archive of the same name gets another folder.
    """
    about = archive.stat()
    folder = archive.with_name(f"{archive.name}.unpacked-{about.st_mtime_ns:x}-{about.st_size:x}")
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory(dir=archive.parent, prefix=f".{archive.name}.") as workplace:
        try:
            unpack(archive, Path(workplace, "archive")).rename(folder)
        except OSError:
            if not folder.is_dir():  # if the folder exists now, another process has created it
                raise
    return folder


def unpack(archive: Path, folder: Path) -> Path:
    """Write the files of an archive to a new folder, and return the folder that contains the files.

    If a folder contains only one folder and no files, the inner folder is returned.  Files have the user's default
    permissions.

    Raises:
        tarfile.TarError: the archive is empty, has too many members, or has a member that is not a plain file or folder
            below ``folder``.
    """
    folder.mkdir()
    with tarfile.open(archive) as file:
        for number, member in enumerate(file):
            if number == MOST_MEMBERS:
                raise tarfile.ReadError(f"the archive has more than {MOST_MEMBERS} files")
            file.extract(member, folder, filter=only_plain_files)
    found = [*folder.iterdir()]
    if not found:
        raise tarfile.ReadError("the archive is empty")
    while len(found) == 1 and found[0].is_dir():
        folder, found = found[0], [*found[0].iterdir()]
    return folder


def only_plain_files(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo:
    """Filter members for `tarfile`: refuse links, devices, sparse files, and paths that lead out of the folder."""
    if not (member.isdir() or (member.isreg() and not member.issparse() and member.size >= 0)):
        raise tarfile.ReadError(f"{member.name[:100]!r} is a link, a device or another special file")
    return tarfile.data_filter(member, folder).replace(mode=None, deep=False)  # type: ignore[arg-type]
