"""A server in a separate process, and a client."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.commands import MAIN, ROOT


class Server:
    """A running server."""

    def __init__(self, process: subprocess.Popen[str], url: str, log: Path) -> None:
        self.process, self.url, self.log = process, url, log

    def connect(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        return http.client.HTTPConnection(parts.hostname, parts.port, timeout=120)

    def ask(
        self, path: str, body: Any = None, method: str | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, http.client.HTTPMessage]:
        """Return status, content (parsed, if it is JSON) and headers of the answer; a dictionary is sent as JSON."""
        connection = self.connect()
        if isinstance(body, dict):
            body, headers = json.dumps(body), {"content-type": "application/json", **(headers or {})}
        connection.request(method or ("GET" if body is None else "POST"), path, body, headers or {})
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        is_json = answer.headers["content-type"] == "application/json"
        return answer.status, json.loads(content) if is_json else content, answer.headers

    def translate(self, q: str | list[str], **more: Any) -> Any:
        status, answer, _ = self.ask("/translate", {"q": q, "source": "en", "target": "de", **more})
        assert status == 200, answer
        return answer

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    def is_idle(self) -> bool:
        """Return whether the server uses no CPU time from one to two seconds after the call."""
        time.sleep(1)
        before = self.cpu_seconds()
        time.sleep(1)
        return self.cpu_seconds() - before < 0.2

    def memory(self) -> int:
        """Return the resident memory in bytes."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def serving(log: Path, *words: object, before: str = "") -> Iterator[Server]:
    """Run ``fairseq-plugins serve`` on a free port; it must stop on SIGTERM, without tracebacks in its messages.

    The code ``before`` may change limits of the server.
    """
    command = [sys.executable, "-W", "ignore", "-c", before + MAIN, "serve", *map(str, words), "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert "http://" in line, log.read_text()
            yield Server(process, line.strip().partition(": ")[2], log)
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            assert process.wait(60) == -signal.SIGTERM
            assert "Traceback" not in log.read_text(), log.read_text()
        finally:
            process.kill()
