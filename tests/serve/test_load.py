"""Many concurrent callers, well-behaved and hostile, and the shutdown of the server."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn
import uvloop

from fairseq_plugins.cli.serve import server as server_module
from fairseq_plugins.export.translate import Translator
from tests.export.exporting import lines_of
from tests.serve.serving import Server, serving

WORDS = 40


def message(q: Any, **more: Any) -> bytes:
    """Return a request to translate."""
    body = json.dumps({"q": q, "source": "en", "target": "de", **more}).encode()
    head = b"POST /translate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Read the next answer, and return its status and content."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    size = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return int(head.split()[1]), await reader.readexactly(size)


async def connect(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(server.url)
    return await asyncio.open_connection(parts.hostname, parts.port)


async def call(server: Server, lines: list[str], callers: int, found: dict[str, str]) -> None:
    """Let several callers send lines, each caller one line after another."""
    waiting = iter(lines)

    async def caller() -> None:
        reader, writer = await connect(server)
        for line in waiting:
            writer.write(message(line))
            status, content = await answer(reader)
            assert status == 200, content
            found[line] = json.loads(content)["translatedText"]
        writer.close()

    await asyncio.gather(*(caller() for _ in range(callers)))


def test_callers_share_batches(folder: Path, translator: Translator, tmp_path: Path) -> None:
    """Answers equal those of `translate.py`, and concurrent requests need less CPU time than consecutive ones."""
    lines = list(dict.fromkeys(lines_of([1 + number % 20 for number in range(150)], WORDS)))
    expected = dict(zip(lines, translator.translate(lines), strict=True))
    seconds = []
    with serving(tmp_path / "log", folder, "--threads", 2) as server:
        for callers in (32, 1):
            before, found = server.cpu_seconds(), {}
            asyncio.run(call(server, lines, callers, found))
            seconds.append(server.cpu_seconds() - before)
            assert found == expected
    assert seconds[0] < 0.8 * seconds[1]


def test_a_short_text_does_not_wait_for_a_long_one(folder: Path, tmp_path: Path) -> None:
    async def both(server: Server) -> None:
        reader, writer = await connect(server)
        writer.write(message("\n".join(lines_of([30] * 800, WORDS))))
        await asyncio.sleep(0.5)
        long = asyncio.ensure_future(answer(reader))
        began = time.perf_counter()
        await call(server, ["w1 w2"], 1, {})
        short, still = time.perf_counter() - began, not long.done()
        assert (await long)[0] == 200
        assert still
        assert short < 0.5 * (time.perf_counter() - began)
        writer.close()

    with serving(tmp_path / "log", folder, "--threads", 1) as server:
        asyncio.run(both(server))


def test_the_end_under_load(folder: Path, translator: Translator, tmp_path: Path) -> None:
    """After SIGTERM, the server answers all requests that it has received, and then exits."""
    lines = lines_of([25] * 300, WORDS)
    expected = translator.translate(lines)

    async def end(server: Server) -> None:
        connections = [await connect(server) for _ in range(100)]
        for number, (_, writer) in enumerate(connections):
            writer.write(message(lines[3 * number : 3 * number + 3]))
        await asyncio.sleep(0.05)
        server.process.send_signal(signal.SIGTERM)
        for number, (reader, _) in enumerate(connections):
            status, content = await answer(reader)
            assert (status, json.loads(content)["translatedText"]) == (200, expected[3 * number : 3 * number + 3])

    with serving(tmp_path / "log", folder) as server:
        asyncio.run(end(server))
        assert server.process.wait(10) == -signal.SIGTERM


@pytest.mark.parametrize("others", [0, 1])
def test_connections_that_wait_at_the_end_are_accepted(others: int, folder: Path, tmp_path: Path) -> None:
    """The system has connected the caller, but the server has not yet noticed; an idle server must not reset it."""
    with serving(tmp_path / "log", folder) as server:
        connections = [server.connect() for _ in range(others)]
        for each in connections:
            each.connect()
        time.sleep(0.3)
        server.process.send_signal(signal.SIGSTOP)
        caller = server.connect()
        caller.request("GET", "/health")
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGCONT)
        assert caller.getresponse().status == 200
        assert server.process.wait(30) == -signal.SIGTERM


def hostile(chance: random.Random) -> tuple[bytes, set[int]]:
    """Return a random request and its allowed statuses; a client that does not wait for an answer has none."""
    letters = chance.choice(["w1 w2. ", "w3\n", "\U0001f600", "\0", "%s ", "<b>", " "])
    text = letters * chance.randrange(1, 200)
    good = message(" ".join(lines_of([chance.randrange(1, 12)], WORDS)))
    large = message(chance.choice(["w1 w2 w3.\n" * 10_000, ("w1 w2 " * 30 + "\n") * 500]))
    served = {200, 429, 503}  # requests are refused if long texts fill the queue
    requests: list[tuple[bytes, set[int]]] = [
        (good, served),
        (message(text, alternatives=chance.randrange(5), details=True, attention=chance.random() < 0.3), served),
        (message(""), {400}),
        (large if chance.random() < 0.1 else good, served | {413}),  # expensive requests are less frequent than others
        (message("w" * 200_000), {413}),
        (message(text)[:-2] + b"[{", {400}),
        (message(text, target="xx"), {400}),
        (b"GET /" + b"x" * chance.randrange(5000) + b" HTTP/1.1\r\nHost: a\r\n\r\n", {404}),
        (chance.randbytes(200) + b"\r\n\r\n", {0, 400}),
        (b"GET / HTTP/1.1\r\nA: " + b"a" * 200_000 + b"\r\n\r\n", {0, 400, 200}),
        (message(text)[:60], set()),
        (message(text), set()),
    ]
    return chance.choice(requests)


async def attack(server: Server, number: int, at_a_time: int, told: Callable[[int], None]) -> None:
    """Send requests of all kinds: each is answered or refused."""
    chance = random.Random(1)
    waiting = iter(range(number))

    async def one(content: bytes, statuses: set[int]) -> None:
        reader, writer = await connect(server)
        writer.write(content)
        if statuses:
            try:
                status, _ = await asyncio.wait_for(answer(reader), 120)
            except (asyncio.IncompleteReadError, ConnectionError):
                status = 0
            assert status in statuses, (status, content[:200])
        else:
            await asyncio.sleep(chance.random() / 5)
        writer.transport.abort()

    async def caller() -> None:
        for place in waiting:
            await one(*hostile(chance))
            told(place)

    await asyncio.gather(*(caller() for _ in range(at_a_time)))


@pytest.mark.parametrize(("number", "growth"), [(300, 1.5), pytest.param(20_000, 1.1, marks=pytest.mark.slow)])
def test_hostile_requests(number: int, growth: float, folder: Path, tmp_path: Path) -> None:
    """The server survives, its memory does not grow, and its answers do not change."""
    memory: list[int] = []
    with serving(tmp_path / "log", folder) as server:
        every = number // 10

        def told(place: int) -> None:
            if place % every == every - 1:
                memory.append(server.memory())

        before = server.translate(["w1 w2", "w3"])
        asyncio.run(attack(server, number, min(100, number // 5), told))
        assert server.translate(["w1 w2", "w3"]) == before
        assert max(memory[len(memory) // 2 :]) < growth * max(memory[: len(memory) // 2])


@asynccontextmanager
async def impatient(app: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Any, ...]]:
    """Run a server with time limits of tenths of a second, yield a connection, and wait for the server's exit."""
    monkeypatch.setattr(server_module, "SLOW", 0.05)
    listening = socket.create_server(("127.0.0.1", 0))
    server = server_module.Server(uvicorn.Config(app, http=server_module.Protocol, lifespan="off"))
    serving = asyncio.ensure_future(server.serve([listening]))
    reader, writer = await asyncio.open_connection(*listening.getsockname())
    yield reader, writer, server
    server.should_exit = True
    await asyncio.wait_for(serving, 20)
    writer.close()


@pytest.mark.parametrize("chunk", [20_000_000, 10_000])
def test_a_client_that_does_not_read_its_answer_does_not_prevent_the_exit(chunk: int, monkeypatch) -> None:
    """Neither does an answer of which only a few bytes exceed the system's buffers."""
    servers: list[Any] = []

    async def app(_: Any, __: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        (connection,) = servers[0].server_state.connections
        while not connection.transport.get_write_buffer_size():
            await send({"type": "http.response.body", "body": bytes(chunk), "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def exit_while_a_client_waits() -> None:
        async with impatient(app, monkeypatch) as (_, writer, server):
            servers.append(server)
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            await asyncio.sleep(0.3)

    uvloop.run(exit_while_a_client_waits())


def test_bodies_that_no_endpoint_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection closes, but not while the body waits for the answer to an earlier request."""

    async def app(scope: Any, _: Any, send: Any) -> None:
        await asyncio.sleep(1 if scope["path"] == "/long" else 0)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": scope["path"].encode()})

    async def ask(requests: bytes, drip: bytes) -> tuple[bytes, float]:
        async with impatient(app, monkeypatch) as (reader, writer, _):
            began = time.monotonic()
            found = asyncio.ensure_future(reader.read())
            writer.write(requests)
            while not found.done() and time.monotonic() - began < 10:
                await asyncio.sleep(0.1)
                writer.write(drip)
            return await found, time.monotonic() - began

    head = b" HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n"
    found, seconds = uvloop.run(ask(b"GET /short" + head, b"x"))
    assert found.endswith(b"/short\r\n0\r\n\r\n")
    assert seconds < 5
    found, seconds = uvloop.run(ask(b"GET /long HTTP/1.1\r\nHost: a\r\n\r\nGET /short" + head + b"x", b""))
    assert found.count(b"HTTP/1.1 200") == 2


SLOW = "from fairseq_plugins.cli.serve import parameters; parameters.SLOW = 1; "


def test_slow_requests_end(folder: Path, tmp_path: Path) -> None:
    """The server closes a connection that sends nothing, half a header or half a body."""

    async def wait(server: Server, content: bytes) -> bytes:
        reader, writer = await connect(server)
        writer.write(content)
        found = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        return found

    async def all_kinds(server: Server) -> list[bytes]:
        head = message("w1").partition(b"\r\n\r\n")[0]
        kinds = (b"", head[:30], head + b"\r\n\r\n{", message("w1") + b"POST /transl")
        return await asyncio.gather(*(wait(server, kind) for kind in kinds))

    with serving(tmp_path / "log", folder, before=SLOW) as server:
        nothing, head, body, second = asyncio.run(all_kinds(server))
    assert (nothing, head) == (b"", b"")
    assert body.startswith(b"HTTP/1.1 408 ")
    assert second.count(b"HTTP/1.1 ") == second.count(b"HTTP/1.1 200 ") == 1
