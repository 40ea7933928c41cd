"""A test server for downloads."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from tests.commands import ROOT

sys.path.append(str(ROOT / "examples" / "prepare"))  # scripts of the examples import each other by name


class Server(ThreadingHTTPServer):
    """Serve ``files``; ``breaks`` drops connections half-way, and without ``ranges`` whole files are sent."""

    files: dict[str, bytes]
    breaks = False
    ranges = True
    asked: list[str | None]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        content, wanted = self.server.files.get(self.path), self.headers.get("Range")
        self.server.asked.append(wanted)
        if content is None:
            self.send_error(404)
            return
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and self.server.ranges else 0
        if start >= len(content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(content)}")
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start : len(content) // 2 if self.server.breaks else None])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    with Server(("127.0.0.1", 0), Handler) as server:
        server.files, server.asked = {}, []
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def url(server: Server, name: str = "file.bin") -> str:
    return f"http://127.0.0.1:{server.server_port}/{name}"
