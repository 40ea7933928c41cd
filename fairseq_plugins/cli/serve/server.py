"""The uvicorn server, with limits for the head of a request, and a graceful shutdown."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fairseq_plugins.cli.serve.app import Limits, make_app
from fairseq_plugins.cli.serve.batches import Batches, Pair, Threads
from fairseq_plugins.cli.serve.parameters import SLOW

if TYPE_CHECKING:
    from fairseq_plugins.export.translate import Translator

CONNECTIONS = 500
HEADERS = {  # for all answers
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
HEAD = 65536  # maximum number of bytes in a request's head
# The server closes a connection after PATIENT * SLOW seconds without progress.  `read_body` refuses an incomplete body
# earlier, after SLOW seconds.  While a client reads an answer, the operating system reports progress only after each
# step of up to a megabyte.  A slow client may take more than SLOW seconds for one step.
PATIENT = 6
GRACE = 0.2  # seconds that the server waits for connections and requests that were sent before the shutdown


class Protocol(HttpToolsProtocol):
    """A connection that closes if a request's head is too long, or if the client sends or reads too slowly."""

    def connection_made(self, transport: Any) -> None:
        """Start the time limit for the first request's head."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # so that asyncio calls `pause_writing` for any bytes that must wait
        self._in_head, self._size = True, 0
        self._timer = self._reading = self.loop.call_later(SLOW, self._close)
        self._unread = 0  # bytes of the answer that waited to be sent when the timer `_reading` started

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all time limits."""
        self._timer.cancel()
        self._reading.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Start the time limit in which the client must read a part of the answer."""
        super().pause_writing()
        self._unread = self.transport.get_write_buffer_size()
        self._reading = self.loop.call_later(PATIENT * SLOW, self._expect_progress)

    def resume_writing(self) -> None:
        """Stop the time limit in which the client must read a part of the answer; all waiting bytes have been sent."""
        self._reading.cancel()
        super().resume_writing()

    def _expect_progress(self) -> None:
        before, self._unread = self._unread, self.transport.get_write_buffer_size()
        if self._unread < before:
            self._reading = self.loop.call_later(PATIENT * SLOW, self._expect_progress)
        else:
            self.transport.abort()

    def _close(self) -> None:
        if self._in_head and (self._size or self.cycle is None):  # uvicorn closes idle connections itself
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Pass received bytes to uvicorn's parser; close the connection if the head of a request is too long."""
        if self._in_head and not self._size:
            self._timer.cancel()
            self._timer = self.loop.call_later(SLOW, self._close)
        self._size += len(data)
        super().data_received(data)
        if self._in_head and self._size > HEAD:
            self.transport.close()

    def on_headers_complete(self) -> None:
        """Stop the time limit for the head, and start the time limit for the body, even if no endpoint reads it."""
        self._in_head = False
        self._timer.cancel()
        self._timer = self.loop.call_later(PATIENT * SLOW, self._expect_body)
        super().on_headers_complete()

    def _expect_body(self) -> None:
        if self.flow.read_paused:  # uvicorn reads this body when it has answered the connection's earlier requests
            self._timer = self.loop.call_later(PATIENT * SLOW, self._expect_body)
        else:
            self.transport.close()

    def on_message_complete(self) -> None:
        """Expect the next request's head; its time limit starts when its first bytes arrive."""
        self._timer.cancel()
        super().on_message_complete()
        self._in_head, self._size = True, 0


class Server(uvicorn.Server):
    """A server that reads and answers all requests that were sent before its shutdown."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections that wait, refuse new ones, and read and answer requests that were already sent."""
        # When a socket is closed, the system resets the connections that were not accepted.  The server therefore first
        # accepts connections until their number no longer grows.
        known: set[Any] | None = None
        for _ in range(10):
            if known == (known := set(self.server_state.connections)):
                break
            await asyncio.sleep(GRACE)
        for server in self.servers:
            server.close()
        await asyncio.sleep(GRACE)
        await super().shutdown(sockets)


async def serve(
    models: Mapping[Pair, Translator], limits: Limits, listening: socket.socket, threads: int, beam: int, most: int
) -> None:
    """Serve until a signal stops the server.

    Args:
        models: models by source and target language.
        limits: limits of a request.
        listening: socket that is bound to the server's address.
        threads: number of translating threads.
        beam: beam size.
        most: largest number of sentences in the queue of a model.
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
