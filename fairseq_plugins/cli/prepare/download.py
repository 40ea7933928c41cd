"""Download files, resume interrupted downloads, and verify checksums."""

from __future__ import annotations

import fcntl
import hashlib
import os
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from fairseq_plugins.cli.bar import bar
from fairseq_plugins.common.files import refuse_pipe

BLOCK = 1 << 20  # bytes
TIMEOUT = 60  # seconds


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
                partial.unlink()  # If it stayed, the next call would resume a wrong file.
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
        if error.headers.get("Content-Range") == f"bytes */{have}":
            return have  # the file is complete
        # The partial file is too long, or the server does not report a size: download from the start.
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


def digest(path: Path, algorithm: str) -> str:
    """Return the checksum of a file in hexadecimal digits."""
    with path.open("rb") as file:
        return digest_of(file, algorithm)


def digest_of(file: Any, algorithm: str) -> str:
    """Return the checksum of an open binary file in hexadecimal digits."""
    found = hashlib.new(algorithm)
    while block := file.read(BLOCK):
        found.update(block)
    return found.hexdigest()
