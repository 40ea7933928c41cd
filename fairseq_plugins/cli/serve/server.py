"""The server: uvicorn, with an end that loses no request."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fairseq_plugins.cli.serve.app import Limits, make_app
from fairseq_plugins.cli.serve.batches import Batches, Threads
from fairseq_plugins.cli.serve.models import Pair
from fairseq_plugins.cli.serve.parameters import SLOW

if TYPE_CHECKING:
    from fairseq_plugins.export.translate import Translator

CONNECTIONS = 500
HEADERS = {  # of each answer
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
HEAD = 65536  # bytes of the head of a request
GRACE = 0.2  # seconds in which the server reads what was sent to it before its end


class Protocol(HttpToolsProtocol):
    """A connection that ends where the head of a request is too long or does not come."""

    def connection_made(self, transport: Any) -> None:
        """Wait for the first head."""
        super().connection_made(transport)
        self._in_head, self._size = True, 0
        self._timer = self.loop.call_later(SLOW, self._close)

    def _close(self) -> None:
        if self._in_head and (self._size or self.cycle is None):  # else it is idle, which uvicorn ends in its time
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Read a part of a request."""
        if self._in_head and not self._size:
            self._timer.cancel()
            self._timer = self.loop.call_later(SLOW, self._close)
        self._size += len(data)
        super().data_received(data)
        if self._in_head and self._size > HEAD:
            self.transport.close()

    def on_headers_complete(self) -> None:
        """Stop waiting."""
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Wait for the next head."""
        super().on_message_complete()
        self._in_head, self._size = True, 0


class Server(uvicorn.Server):
    """A server that reads what has been sent before it ends, and then answers all of it."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept nobody new, read for a moment what is on its way, and answer."""
        for server in self.servers:
            server.close()
        await asyncio.sleep(GRACE)
        await super().shutdown(sockets)


async def serve(
    models: Mapping[Pair, Translator], limits: Limits, listening: socket.socket, threads: int, beam: int, most: int
) -> None:
    """Serve until a signal.

    Args:
        models: by their languages.
        limits: limits of a request.
        listening: the socket.
        threads: batches at a time.
        beam: hypotheses of a sentence.
        most: sentences that may wait for one model.
    """
    pool = Threads(threads)
    queues = {pair: Batches(translator, pool, beam, most) for pair, translator in models.items()}
    config = uvicorn.Config(
        make_app(queues, limits),
        http=Protocol,
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        headers=[*HEADERS.items()],
        limit_concurrency=CONNECTIONS,
        timeout_keep_alive=SLOW,
    )
    host, port = listening.getsockname()[:2]
    pairs = ", ".join(f"{source} to {target}" for source, target in models)
    print(f"{pairs}: http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
    await Server(config).serve([listening])
