"""Downloads that lose their connection, resume, or have unexpected content."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import downloads
import pytest
from downloads import download, fetch, fingerprints, text

from tests.examples.conftest import Server, url

CONTENT = bytes(range(256)) * 1000
SHA256 = "sha256:" + hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture(autouse=True)
def served(server: Server) -> None:
    server.files["/file.bin"] = CONTENT


@pytest.mark.parametrize("ranges", [True, False])
def test_a_download_resumes_where_it_stopped(server: Server, tmp_path: Path, ranges: bool) -> None:
    path, server.breaks, server.ranges = tmp_path / "file.bin", True, ranges
    with pytest.raises(OSError, match=f"{len(CONTENT) // 2} of {len(CONTENT)} bytes"):
        download(url(server), path, SHA256)
    assert not path.exists()
    server.breaks = False
    download(url(server), path, SHA256)
    assert path.read_bytes() == CONTENT
    download(url(server), path, SHA256)  # complete
    assert server.asked == [None, f"bytes={len(CONTENT) // 2}-"]


def test_a_wrong_file_is_refused_and_not_continued(server: Server, tmp_path: Path) -> None:
    server.files["/file.bin"] = CONTENT[:-1] + b"x"
    with pytest.raises(ValueError, match=SHA256.removeprefix("sha256:")):
        download(url(server), tmp_path / "file.bin", SHA256)
    assert list(tmp_path.iterdir()) == []
    server.files["/file.bin"] = CONTENT
    download(url(server), tmp_path / "file.bin", SHA256)
    with pytest.raises(OSError, match="404"):
        download(url(server, "nothing"), tmp_path / "nothing")
    nobody = "http://127.0.0.1:1/file.bin"
    with pytest.raises(OSError, match=nobody):
        download(nobody, tmp_path / "nothing")


def test_a_file_that_may_have_changed_is_not_continued(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.bin.partial").write_bytes(CONTENT + b"more")
    download(url(server), tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


def test_concurrent_downloads_of_a_file_are_refused(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = downloads._fetch

    def meanwhile(*words: object) -> int | None:
        with pytest.raises(ValueError, match=r"/file\.bin"):
            download(url(server), tmp_path / "file.bin")
        return fetch(*words)

    monkeypatch.setattr(downloads, "_fetch", meanwhile)
    download(url(server), tmp_path / "file.bin", SHA256)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


@pytest.mark.parametrize("made", [os.mkfifo, Path.mkdir])
def test_a_pipe_or_folder_at_the_path_of_a_download_is_named(server: Server, tmp_path: Path, made: Any) -> None:
    """The error comes at once, because reading a pipe would block."""
    path = tmp_path / "file.bin"
    made(path)
    files = text("file.{}", ("bin", "gz"))[0]
    for function, *words in (
        (download, url(server), path),
        (fetch, files, tmp_path, files),
        (fingerprints, files, tmp_path),
    ):
        with pytest.raises(ValueError, match=r"file\.bin"):
            function(*words)
    assert not server.asked
