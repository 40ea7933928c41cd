"""Files of a corpus: their sources, downloads, archives and fingerprints."""

from __future__ import annotations

import gzip
import shutil
import tarfile
import zlib
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fairseq_plugins.cli.bar import bar
from fairseq_plugins.cli.prepare.download import digest_of, download
from fairseq_plugins.common.files import refuse_pipe, replacing


@dataclass(frozen=True)
class File:
    """A file of a corpus.

    Attributes:
        path: path relative to the folder.
        url: address of the file, or of a tar archive that contains it under this path; None if it cannot be downloaded.
        checksum: ``sha256:...`` or ``md5:...`` of the download, or of a text that may change.
        folder: folder that contains ``path``, instead of the folder of downloads; not recorded, because projects may
            move.
    """

    path: str
    url: str | None = None
    checksum: str | None = None
    folder: str = field(default="", repr=False)

    def place(self, orig: Path = Path()) -> Path:
        """Return the path of the existing file, with or without the suffix ``.gz``."""
        own = orig / self.folder / self.path
        other = own.with_suffix("") if own.suffix == ".gz" else own.with_name(f"{own.name}.gz")
        return other if other.is_file() and not own.exists() else own


Texts = tuple[tuple[File, File], ...]  # source and target


def text(path: str, languages: tuple[str, str], url: str | None = None, checksum: str | None = None) -> Texts:
    """Return the two files of a text; ``{}`` in path and URL is replaced by the language."""
    source, target = (File(path.format(name), url and url.format(name), checksum) for name in languages)
    return ((source, target),)


def fetch(files: Sequence[File], orig: Path, needed: Container[File], terms: str = "") -> None:
    """Download and unpack the needed files that are missing in ``orig``.

    Args:
        files: all files of a corpus, which determine the names of archives.
        orig: folder of the downloads.
        needed: files to fetch.
        terms: instructions for files that cannot be downloaded.

    Raises:
        ValueError: a file cannot be downloaded, has a wrong checksum, is a pipe, or is missing in its archive.
        OSError: a download fails.
    """
    archives: dict[tuple[str, str | None], list[str]] = {}
    for file in files:
        place = file.place(orig)
        refuse_pipe(place)
        if file not in needed or place.exists():
            continue
        if file.url is None:
            raise ValueError(f"{place} is missing. {terms or 'Put the file there.'}")
        archives.setdefault((file.url, file.checksum), []).append(file.path)
    for (url, checksum), paths in archives.items():
        if Path(paths[0]).name == Path(url).name:
            download(url, orig / paths[0], checksum)
        else:
            archive = orig / archive_name(url, files)
            download(url, archive, checksum)
            unpack(archive, orig, paths)


def archive_name(url: str, files: Sequence[File]) -> str:
    """Return the name to save an archive as: ``test.tgz``, or ``wmt15-test.tgz`` if the corpus has two test.tgz."""
    name, folder = Path(url).name, Path(url).parent.name
    alike = {file.url for file in files if file.url is not None and Path(file.url).name == name}
    return f"{folder}-{name}" if len(alike) > 1 else name


def unpack(archive: Path, folder: Path, paths: Iterable[str]) -> None:
    """Extract files from a tar archive.

    Raises:
        ValueError: a file is missing, or the archive is corrupt.
    """
    missing = dict.fromkeys(paths)  # an ordered set
    try:
        with tarfile.open(archive) as tar:
            for member in bar(tar, desc=f"unpack {archive.name}", unit=" files"):
                name = member.name.removeprefix("./")
                content = tar.extractfile(member) if name in missing else None
                if content is not None:
                    with replacing(folder / name) as beside, beside.open("wb") as file:
                        shutil.copyfileobj(content, file)
                    del missing[name]
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"{archive}: {error}; remove it to download it again") from error
    if missing:
        raise ValueError(f"{archive}: {', '.join(missing)} not found; remove the archive to download it again")


def fingerprints(files: Iterable[File], orig: Path) -> dict[str, str]:
    """Return fingerprints of the existing texts, by path; a gzipped file has the same fingerprint as the plain file.

    A file without a published checksum has its SHA-256 sum as fingerprint.  Files with a published checksum are many
    and large, so their fingerprint is only their size.
    """
    found = {}
    for file in dict.fromkeys(files):
        place = file.place(orig)
        refuse_pipe(place)
        if place.exists() and file.checksum is not None:
            found[file.path] = f"{size_of_text(place)} bytes"
        elif place.exists():
            with gzip.open(place) if place.suffix == ".gz" else place.open("rb") as content:
                try:
                    found[file.path] = f"sha256:{digest_of(content, 'sha256')}"
                except (gzip.BadGzipFile, zlib.error, EOFError) as error:
                    raise ValueError(f"{place}: {error}; replace the file") from error
    return found


def size_of_text(path: Path) -> int:
    """Return the uncompressed size modulo 2³², which a gzip file stores at its end."""
    size = path.stat().st_size
    if path.suffix != ".gz":
        return size % 2**32
    with path.open("rb") as file:
        file.seek(max(size - 4, 0))
        return int.from_bytes(file.read(), "little")
