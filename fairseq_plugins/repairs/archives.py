"""Archives for ``from_pretrained``: they write only below a new folder, and nothing of the user's is lost."""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
import tarfile
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path, PurePosixPath

from fairseq import file_utils

from fairseq_plugins.repairs.wrapping import in_place_of

MOST = 10_000  # files and folders; an archive of fairseq's has about ten
LONGEST = 255  # bytes of a name, as in a plain tar


def unpack(archive: Path, folder: Path) -> None:
    """Write the files of an archive to a new folder, without the folders that hold all of them.

    No name is resolved, for the answer would depend on Python's version and on what the archive has written before.

    Raises:
        tarfile.TarError: a member is not a file or folder below that folder, or there is none.
    """
    with tarfile.open(archive) as file:
        members = list(itertools.islice(file, MOST + 1))
        if not 1 <= len(members) <= MOST:
            raise tarfile.ReadError(f"it holds {'nothing' if not members else f'more than {MOST} members'}")
        paths = [path_of(member) for member in members]
        folders = [path if each.isdir() else path.parent for each, path in zip(members, paths, strict=True)]
        common = os.path.commonpath(folders)
        folder.mkdir()
        for member, path in zip(members, paths, strict=True):
            write(file, member, path.relative_to(common).parts, folder)


def path_of(member: tarfile.TarInfo) -> PurePosixPath:
    """The name of a member.

    Raises:
        tarfile.ReadError: it is a link, device or sparse file, or its name leads out of a folder.
    """
    name = member.name[:LONGEST]
    if not (member.isdir() or (member.isreg() and not member.issparse() and member.size >= 0)):
        raise tarfile.ReadError(f"{name!r} is not a plain file or folder; pack the archive without links and devices")
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or len(os.fsencode(member.name)) > LONGEST:
        raise tarfile.ReadError(f"{name!r} is absolute, holds '..' or is longer than {LONGEST} bytes")
    if member.isreg() and not path.parts:
        raise tarfile.ReadError("it holds a file without a name")
    return path


def write(file: tarfile.TarFile, member: tarfile.TarInfo, path: Sequence[str], root: Path) -> None:
    """Write one member below a folder, part by part from the folder's own descriptor, with this user's modes.

    Raises:
        tarfile.ReadError: the member is there already, or a file is where it needs a folder.
    """
    only_folders = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    with ExitStack() as stack:
        place = os.open(root, only_folders)
        stack.callback(os.close, place)
        try:
            for part in path if member.isdir() else path[:-1]:
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=place)
                place = os.open(part, only_folders, dir_fd=place)
                stack.callback(os.close, place)
            if member.isdir():
                return
            new = os.open(path[-1], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666, dir_fd=place)
        except (FileExistsError, NotADirectoryError):
            raise tarfile.ReadError(f"it holds {member.name!r} twice, or as a file and as a folder") from None
        with os.fdopen(new, "wb") as output:
            shutil.copyfileobj(file.extractfile(member), output)  # type: ignore[arg-type]


def unpacked(archive: Path) -> Path:
    """The folder with what an archive holds: beside it, also for the next time, or for this process alone.

    It is there when it is whole, and the archive stays: no moment of a kill or of another process, and no full disk,
    finds half of either.  An archive that takes the name of another gets another folder.
    """
    about = archive.stat()
    folder = archive.with_name(f"{archive.name}.unpacked-{about.st_mtime_ns:x}-{about.st_size:x}")
    if folder.is_dir():
        return folder
    try:
        workplace = tempfile.TemporaryDirectory(dir=archive.parent, prefix=f".{archive.name}.")
    except OSError:  # nobody may write there
        folder = Path(tempfile.mkdtemp(), archive.name)
        atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
        unpack(archive, folder)
        return folder
    with workplace:
        unfinished = Path(workplace.name, "archive")
        unpack(archive, unfinished)
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():  # by another process, which was faster
                raise
    return folder


def unpack_archives_beside_them() -> None:
    """``from_pretrained`` unpacks archives, which may then write over any file of the user's: a program, say.

    It removes the archive before the folder is in its place.  And what is not there it takes for nothing, which fails
    somewhere else.
    """
    load = file_utils.load_archive_file
    if "extractall" not in load.__code__.co_names:  # the probe: the archive says where to write
        return

    @in_place_of(file_utils, "load_archive_file")
    def load_archive_file(archive_file: str) -> str:
        try:
            path = Path(file_utils.cached_path(archive_file))
        except OSError as error:
            raise FileNotFoundError(f"{archive_file!r} is no folder, archive or known model: {error}") from error
        if path.is_dir():
            return str(load(str(path)))
        try:
            return str(unpacked(path))
        except Exception as error:  # a damaged archive causes almost any
            raise OSError(f"{path} cannot be unpacked: {error}") from error
