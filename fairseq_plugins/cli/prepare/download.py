"""A file of the network: whole, checked, and continued where a stop left it."""

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
TIMEOUT = 60  # seconds without an answer


def download(url: str, path: Path, checksum: str | None = None) -> None:
    """Fetch ``url`` to ``path``, unless it is there: only a whole and right file gets that name.

    Args:
        checksum: ``sha256:`` or ``md5:`` and hexadecimal digits.

    Raises:
        ValueError: the file is not the one that was expected or a pipe, or another process is downloading it.
        OSError: the network fails; what has come is kept, and the next call goes on from there.
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
            raise ValueError(f"another call is downloading {path}") from None
        if path.exists():  # by now; what has been opened and locked is it
            return
        try:
            total = _fetch(url, partial)
        except (OSError, HTTPException) as error:
            raise OSError(f"{url} to {path}: {error}") from error
        have = partial.stat().st_size
        if total is not None and have != total:
            raise OSError(f"{url} broke off after {have} of {total} bytes; run this again to go on")
        if checksum is not None:
            algorithm, _, expected = checksum.partition(":")
            found = digest(partial, algorithm)
            if found != expected:
                partial.unlink()  # else it would be continued, and never be right
                raise ValueError(f"{url} has the {algorithm} sum {found}, and {expected} was expected")
        partial.replace(path)


def _fetch(url: str, partial: Path) -> int | None:
    """Go on with a file; gives the bytes that it should then have, as far as the server tells."""
    have = partial.stat().st_size
    request = Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        answer = urlopen(request, timeout=TIMEOUT)
    except HTTPError as error:
        if error.code != HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE or not have:
            raise
        if error.headers.get("Content-Range") == f"bytes */{have}":
            return have  # nothing is left to fetch
        os.truncate(partial, 0)  # as long as the file is not, or perhaps not: it is another's
        return _fetch(url, partial)
    with answer as response:
        if response.status != HTTPStatus.PARTIAL_CONTENT:
            have = 0  # the server knows no ranges, and sends all of it
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
    """The sum of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return digest_of(file, algorithm)


def digest_of(file: Any, algorithm: str) -> str:
    """The same of a file that is open for bytes."""
    found = hashlib.new(algorithm)
    while block := file.read(BLOCK):
        found.update(block)
    return found.hexdigest()
