"""A test server for downloads, and texts and options for own-data."""

from __future__ import annotations

import random
from argparse import ArgumentParser
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from fairseq_plugins.cli.own_data import command as own_data


class Server(ThreadingHTTPServer):
    """Serves ``files``; ``breaks`` drops connections half-way, and without ``ranges`` it always sends whole files.

    Without ``sizes`` it sends chunks without a total length.
    """

    files: dict[str, bytes]
    breaks = False
    ranges = True
    sizes = True
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
        if not self.server.sizes:
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"100000\r\n" + content[: len(content) // 2])
            return
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
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def url(server: Server, name: str = "file.bin") -> str:
    return f"http://127.0.0.1:{server.server_port}/{name}"


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts like image captions: untokenised, without repeated sentences."""
    folder = tmp_path_factory.mktemp("texts")
    generator = random.Random(1)
    nouns = {"dog": "Hund", "man": "Mann", "well-known boat": "bekanntes Boot", "horse": "Pferd"}
    number = 0
    for part, size in (("train", 300), ("test", 7)):
        pairs = []
        for place in range(size):
            first, second = generator.choices(list(nouns), k=2)
            number += 1
            # Two lines, one of them in the validation part, are too long for a model of `TINY`.
            much = "".join(f" {n}" for n in range(100)) if place in (1, 19) else ""
            pairs.append(
                (
                    f"A {first}, and{much} a {second} {number}.",
                    f"Ein {nouns[first]}, und{much} ein {nouns[second]} {number}.",
                )
            )
        for language, lines in zip(("en", "de"), zip(*pairs, strict=True), strict=True):
            (folder / f"{part}.{language}").write_text("".join(f"{line}\n" for line in lines))
    return folder


def parse(*words: object) -> Any:
    """Parse a command line of own-data."""
    parser = ArgumentParser()
    own_data.add_arguments(parser)
    return parser.parse_args([*map(str, words)])
