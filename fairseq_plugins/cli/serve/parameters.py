"""Requests: parameters from JSON or forms, sentences of texts and documents, and translated files for download."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qs

import anyio
from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from fairseq_plugins.cli import catalogues

SLOW = 10  # seconds in which a request must arrive
FEW = 100  # maximum number of fields in a form
FORMATS = [".txt", catalogues.SUFFIX]
KEPT = 16_000_000  # maximum number of bytes of all translated files in memory
# Matches possible ends of sentences: line ends, punctuation followed by whitespace, and Chinese or Japanese
# punctuation, which needs no whitespace. The lookbehind makes the search take linear time.
_BOUNDARY = re.compile(r"\n\s*|(?<![.!?…])[.!?…]+[\"'”’»)\]]*\s+|[。！？]+[”』」）]*\s*")
_OPENING = "\"'“„«([¿¡"
_ABBREVIATIONS = {"bzw", "ca", "dr", "fig", "inkl", "mr", "mrs", "ms", "nr", "prof", "st", "usw", "vgl", "vs", "zzgl"}

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


class Sentence(NamedTuple):
    """A sentence with surrounding whitespace; the sentence is empty if the text has only whitespace."""

    before: str
    text: str
    after: str


def split(text: str) -> list[Sentence]:
    """Return the sentences of a text; their concatenation, with the whitespace between them, is the text."""
    starts = [0, *(match.end() for match in _BOUNDARY.finditer(text) if _is_end(text, match)), len(text)]
    return [_between_spaces(text[start:end]) for start, end in pairwise(starts) if start < end]


def _is_end(text: str, match: re.Match[str]) -> bool:
    """Return whether a match of `_BOUNDARY` ends a sentence.

    Line ends and Chinese or Japanese punctuation always end a sentence.  Other punctuation does not end a sentence
    before a lower-case letter, and a full stop does not end a sentence after an abbreviation or an ordinal.
    """
    marks = match[0].strip()
    if "\n" in match[0] or marks[:1] in "。！？":
        return True
    following = text[match.end() : match.end() + 2].lstrip(_OPENING)[:1]
    word = re.split(r"[^\w]", text[max(0, match.start() - 20) : match.start()])[-1]
    is_short = len(word) == 1 or word.lower() in _ABBREVIATIONS or (word.isdecimal() and len(word) <= 2)
    return not following.islower() and not (marks == "." and is_short)


def _between_spaces(chunk: str) -> Sentence:
    text = chunk.strip()
    before, _, after = chunk.partition(text) if text else ("", "", chunk)
    return Sentence(before, text, after)


@dataclass(frozen=True)
class Document:
    """A file to translate; ``fill`` gets translations of the texts, and returns the translated file and a report."""

    name: str  # file name without a folder
    texts: list[str]  # distinct texts to translate
    fill: Callable[[Mapping[str, str]], tuple[bytes, str]]

    def sentences(self) -> list[str]:
        """Return the distinct sentences of all texts."""
        return [*dict.fromkeys(each.text for text in self.texts for each in split(text) if each.text)]

    def translated(self, translations: Mapping[str, str]) -> tuple[bytes, str]:
        """Return the translated file and a report, given the translations of all `sentences`."""
        translations = {**translations, "": ""}
        joined = (
            "".join(each.before + translations[each.text] + each.after for each in split(text)) for text in self.texts
        )
        return self.fill(dict(zip(self.texts, joined, strict=True)))


def read_document(name: str, content: bytes) -> Document:
    """Read an uploaded file.

    Raises:
        ValueError: the file is neither text in UTF-8 nor a gettext catalogue.
    """
    if name.lower().endswith(catalogues.SUFFIX):
        return _read_catalogue(name, content)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise ValueError(f"{name}: neither text in UTF-8 nor a gettext catalogue (.po); convert it to UTF-8 text")
    return Document(name, [text], lambda translations: (translations[text].encode(), ""))


def _read_catalogue(name: str, content: bytes) -> Document:
    with TemporaryDirectory() as folder:  # polib.pofile(text) would open a file whose name equals the text
        path = Path(folder, "catalogue.po")
        path.write_bytes(content)
        try:
            catalogue = catalogues.load(path)
        except ValueError as error:
            raise ValueError(str(error).replace(str(path), name)) from None
    gaps = catalogues.gaps(catalogue)

    def fill(translations: Mapping[str, str]) -> tuple[bytes, str]:
        for gap in gaps:
            gap.fill(translations)
        return catalogues.in_utf8(catalogue), catalogues.report(Path(name), gaps)

    return Document(name, [*dict.fromkeys(line for gap in gaps for line in gap.lines())], fill)


class Results:
    """The newest translated files, in memory."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}

    def add(self, name: str, content: bytes) -> str:
        """Keep a file, and return an unguessable name for its download."""
        key = f"{secrets.token_urlsafe(16)}.{name}"
        self._files[key] = content
        while sum(map(len, self._files.values())) > KEPT and len(self._files) > 1:
            del self._files[next(iter(self._files))]
        return key

    def get(self, key: str) -> bytes | None:
        """Return a file, or None if newer files have replaced it."""
        return self._files.get(key)
