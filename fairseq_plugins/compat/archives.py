"""Archives that ``from_pretrained`` unpacks: nothing is written elsewhere, and nothing of the user's is lost."""

from __future__ import annotations

import atexit
import os
import shutil
import tarfile
import tempfile
from pathlib import Path

from fairseq import file_utils

from fairseq_plugins.compat.wrapping import in_place_of

__all__ = ["unpack_archives_beside_them"]


def unpack(archive: Path, folder: Path) -> None:
    """Unpack what is in the folder that holds all of it, and only files, folders and links that stay there.

    Python does not look at that by itself before 3.14.

    Raises:
        tarfile.TarError: something would be elsewhere, or there is nothing.
    """
    with tarfile.open(archive) as file:
        members = file.getmembers()
        for member in members:
            if Path(member.name).is_absolute() or ".." in Path(member.name).parts:
                raise tarfile.OutsideDestinationError(member, member.name)
        if not members:
            raise tarfile.ReadError("it holds nothing")
        folders = [each.name if each.isdir() else str(Path(each.name).parent) for each in members]
        top = os.path.commonpath(folders) or "."

        def below(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
            """Named from there, as Python's filter has to see links: to what is beside that folder they lead out."""
            name, link = os.path.relpath(member.name, top), member.linkname
            if member.islnk():
                link = os.path.relpath(link, top)
            return tarfile.data_filter(member.replace(name=name, linkname=link, deep=False), path)

        file.extractall(folder, filter=below)


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
        except (EOFError, OSError, tarfile.ReadError) as error:
            raise OSError(f"{path} cannot be unpacked: {error}") from error
