"""Read parameters of requests, from JSON or forms, with limits of size and time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar
from urllib.parse import parse_qs

import anyio
from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

SLOW = 10  # seconds in which a request must arrive
FEW = 100  # maximum number of fields in a form

T = TypeVar("T")


async def read_body(request: Request, most: int) -> bytes:
    """Return a request's body, or refuse a body of more than ``most`` bytes.

    A body that is too long is read to its end before the refusal, so that the client receives the error.
    """
    body, size = bytearray(), 0
    try:
        with anyio.fail_after(SLOW):
            async for chunk in request.stream():
                size += len(chunk)
                body += chunk if size <= most else b""
    except TimeoutError:
        raise HTTPException(408, "Invalid request: the body arrived too slowly") from None
    if size > most:
        raise HTTPException(413, f"Invalid request: request ({size} bytes) exceeds text limit ({most} bytes)")
    return bytes(body)


async def read_parameters(request: Request, most: int) -> dict[str, Any]:
    """Parse JSON or a form; a repeated field of a form becomes a list.

    Raises:
        HTTPException: the body is malformed.
    """
    body = await read_body(request, most)
    content_type = request.headers.get("content-type", "")
    kind = content_type.partition(";")[0].strip().lower()
    fields: Any
    try:
        if kind == "multipart/form-data":
            # Starlette decodes a form with the Python codec that the header names; some codecs take quadratic time.
            charset = parse_options_header(content_type)[1].get(b"charset", b"utf-8").lower()
            if charset not in (b"utf-8", b"utf8"):
                raise ValueError("the character set must be UTF-8")

            async def stream() -> AsyncGenerator[bytes, None]:
                yield body

            parser = MultiPartParser(request.headers, stream(), max_files=1, max_fields=FEW, max_part_size=most)
            form = await parser.parse()
            fields = {name: form.getlist(name) for name in form}
        elif kind.endswith("json"):
            fields = json.loads(text := body.decode())
            if not isinstance(fields, dict):
                raise ValueError("an object is expected")
            if "\\u" in text:
                json.dumps(fields, ensure_ascii=False).encode()  # refuse unpaired surrogates
            return fields
        else:
            fields = parse_qs(body.decode(), keep_blank_values=True, max_num_fields=FEW)
    except (ValueError, KeyError, RecursionError, MultiPartException) as error:
        raise HTTPException(400, f"Invalid request: {kind or 'form'} cannot be read: {error}") from None
    return {name: values[0] if len(values) == 1 else values for name, values in fields.items()}


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T], seconds: float) -> T:
    """Return the result of a coroutine; cancel it if the client disconnects, or after a time limit.

    Raises:
        HTTPException: the coroutine was cancelled.
    """

    async def wait_for_the_end() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(wait_for_the_end())
    timer = asyncio.get_running_loop().call_later(seconds, task.cancel)
    gone.add_done_callback(lambda _: task.cancel())
    try:
        return await task
    except asyncio.CancelledError:
        raise HTTPException(503, f"Translation error: no answer within {seconds:g} seconds, try again later") from None
    finally:
        timer.cancel()
        gone.cancel()


def text_of(parameters: dict[str, Any], name: str) -> str:
    """Return a text parameter, or refuse a request without it."""
    value = parameters.get(name)
    if not value:
        raise HTTPException(400, f"Invalid request: missing {name} parameter")
    if not isinstance(value, str):
        raise HTTPException(400, f"Invalid request: {name} parameter is not a text")
    return value


def number_of(parameters: dict[str, Any], name: str, most: int) -> int:
    """Return an integer parameter, or 0 if the parameter is missing or negative.

    Values of other types, and values above ``most``, are refused.
    """
    try:
        value = max(0, int(parameters.get(name) or 0))
    except (TypeError, ValueError, OverflowError):
        raise HTTPException(400, f"Invalid request: {name} parameter is not a number") from None
    if value > most:
        raise HTTPException(400, f"Invalid request: {name} parameter must be <= {most}")
    return value


def is_set(parameters: dict[str, Any], name: str) -> bool:
    """Return whether a parameter is true, in JSON or in a form."""
    return parameters.get(name) not in (None, False, 0, "", "0", "false")


async def file_of(parameters: dict[str, Any]) -> tuple[str, bytes]:
    """Return name and content of the uploaded file, or refuse a request without a file."""
    file = parameters.get("file")
    if not isinstance(file, UploadFile):
        raise HTTPException(400, "Invalid request: missing file parameter")
    return (file.filename or "").replace("\\", "/").rpartition("/")[2], await file.read()
