"""Download the files of a corpus, resume interrupted downloads, unpack archives, and verify checksums."""

from __future__ import annotations

import fcntl
import gzip
import os
import shutil
import tarfile
import zlib
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from fairseq_plugins.cli.parallel_text import bar
from fairseq_plugins.common.files import digest, refuse_pipe, replacing

BLOCK = 1 << 20  # bytes
TIMEOUT = 60  # seconds


@dataclass(frozen=True)
class File:
    """A file of a corpus.

    Attributes:
        path: path relative to the folder of the downloads.
        url: address of the file, or of a tar archive with a member named ``path``; None if it cannot be downloaded.
        checksum: ``sha256:...`` or ``md5:...`` of the download; None if no checksum is published.
    """

    path: str
    url: str | None = None
    checksum: str | None = None

    def place(self, orig: Path = Path()) -> Path:
        """Return the file's path, or the path with ``.gz`` added or removed if only that path exists."""
        own = orig / self.path
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
        files: all files of a corpus, needed or not; `archive_name` searches them for archives with equal names.
        orig: folder of the downloads.
        needed: files to fetch.
        terms: message that says how to get files that cannot be downloaded.

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


def download(url: str, path: Path, checksum: str | None = None) -> None:
    """Download ``url`` to ``path``, unless the path exists; only a complete and correct file gets this name.

    Args:
        url: address.
        path: file to write.
        checksum: ``sha256:`` or ``md5:`` and hexadecimal digits.

    Raises:
        ValueError: the checksum is wrong, the path is a pipe, or another process is downloading the file.
        OSError: the download fails; the next call resumes it.
    """
    refuse_pipe(path)
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{path}: another process is downloading it; wait until it ends") from None
        if path.exists():  # Another process has just renamed the locked file.
            return
        try:
            total = _fetch(url, partial)
        except (OSError, HTTPException) as error:
            raise OSError(f"{url} to {path}: {error}; repeat the command later, or put the file there") from error
        have = partial.stat().st_size
        if total is not None and have != total:
            raise OSError(f"{url}: connection lost after {have} of {total} bytes; repeat the command to resume")
        if checksum is not None:
            algorithm, _, expected = checksum.partition(":")
            found = digest(partial, algorithm)
            if found != expected:
                partial.unlink()  # The next call would resume this wrong file.
                raise ValueError(
                    f"{url}: {algorithm} sum {found}, expected {expected}; repeat the command to download it again"
                )
        partial.replace(path)


def _fetch(url: str, partial: Path) -> int | None:
    """Resume a download; return the size of the complete file if the server reports it."""
    have = partial.stat().st_size
    request = Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        answer = urlopen(request, timeout=TIMEOUT)
    except HTTPError as error:
        if error.code != HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE or not have:
            raise
        # The server has no bytes after the end of the partial file.  The partial file may be the start of another file,
        # so the download starts again.
        os.truncate(partial, 0)
        return _fetch(url, partial)
    with answer as response:
        if response.status != HTTPStatus.PARTIAL_CONTENT:
            have = 0  # the server ignored the range and sends the whole file
        length = response.headers.get("Content-Length")
        total = None if length is None else have + int(length)
        with (
            partial.open("ab" if have else "wb") as file,
            bar(desc=partial.stem, initial=have, total=total, unit="B", unit_scale=True) as progress,
        ):
            while block := response.read(BLOCK):
                file.write(block)
                progress.update(len(block))
    return total


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

    The fingerprint of a file without a published checksum is its SHA-256 sum.  The fingerprint of a file with a
    published checksum is only its size: these files are many and large, so computing SHA-256 sums would take long.
    """
    found = {}
    for file in dict.fromkeys(files):
        place = file.place(orig)
        refuse_pipe(place)
        if place.exists() and file.checksum is not None:
            found[file.path] = f"{size_of_text(place)} bytes"
        elif place.exists():
            try:
                found[file.path] = f"sha256:{digest(place, 'sha256', unzip=place.suffix == '.gz')}"
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
