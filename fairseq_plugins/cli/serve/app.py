"""The web page and the HTTP API of ``serve``; the API extends LibreTranslate's API."""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from fairseq_plugins.cli.catalogues import placeholders
from fairseq_plugins.cli.serve.batches import Batches, Pair, QueueFullError
from fairseq_plugins.cli.serve.parameters import (
    FORMATS,
    Document,
    Results,
    Sentence,
    file_of,
    is_set,
    number_of,
    read_document,
    read_parameters,
    split,
    text_of,
    unless_disconnected,
)

FILE_FACTOR = 10  # maximum number of characters in a file, as a multiple of the maximum for texts
FILES = 4  # maximum number of files that are translated in parallel
CHUNK = 128  # maximum number of a file's sentences in the queue


NAMES = dict(
    re.findall(
        r"(\w+)=(\w+)",
        """ar=Arabic bg=Bulgarian bn=Bengali ca=Catalan cs=Czech da=Danish de=German el=Greek en=English eo=Esperanto
        es=Spanish et=Estonian eu=Basque fa=Persian fi=Finnish fr=French ga=Irish gl=Galician he=Hebrew hi=Hindi
        hr=Croatian hu=Hungarian id=Indonesian is=Icelandic it=Italian ja=Japanese ko=Korean lt=Lithuanian lv=Latvian
        ms=Malay nb=Norwegian nl=Dutch pl=Polish pt=Portuguese ro=Romanian ru=Russian sk=Slovak sl=Slovenian
        sq=Albanian sr=Serbian sv=Swedish sw=Swahili th=Thai tl=Tagalog tr=Turkish uk=Ukrainian ur=Urdu
        vi=Vietnamese zh=Chinese""",
    )
)


@dataclass(frozen=True)
class Limits:
    """Limits of requests."""

    key: str | None  # API key
    letters: int  # maximum number of characters in the texts of a request
    seconds: float  # time limit of an answer
    origins: list[str]  # web origins whose pages may call the server


class Api:
    """Endpoints."""

    def __init__(self, models: Mapping[Pair, Batches], limits: Limits) -> None:
        self.models, self.limits = models, limits
        self.results, self.files = Results(), asyncio.Semaphore(FILES)

    async def languages(self, request: Request) -> Response:
        """List all source languages with their target languages, like LibreTranslate."""
        codes = dict.fromkeys(code for pair in self.models for code in pair)
        targets = {code: [target for source, target in self.models if source == code] for code in codes}
        return JSONResponse([{"code": code, "name": name(code), "targets": targets[code]} for code in codes])

    async def health(self, request: Request) -> Response:
        """Report that the server is alive."""
        return JSONResponse({"status": "ok"})

    async def settings(self, request: Request) -> Response:
        """Return limits and default languages, like LibreTranslate."""
        source, target = next(iter(self.models))
        answer = {
            "charLimit": self.limits.letters,
            "keyRequired": self.limits.key is not None,
            "alternativesLimit": min(batches.beam for batches in self.models.values()) - 1,
            "filesTranslation": True,
            "supportedFilesFormat": FORMATS,
            "language": {side: {"code": x, "name": name(x)} for side, x in (("source", source), ("target", target))},
        }
        return JSONResponse(answer)

    async def detect(self, request: Request) -> Response:
        """Return the source language that all models share, or refuse the request; do not inspect the text."""
        parameters = await self.allowed(request)
        text_of(parameters, "q")
        return JSONResponse([detected(self.source_for(None))])

    async def translate(self, request: Request) -> Response:
        """Translate one text or several."""
        parameters = await self.allowed(request)
        q = parameters.get("q")
        texts = q if isinstance(q, list) else [text_of(parameters, "q")]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise HTTPException(400, "Invalid request: q parameter is neither a text nor a list of texts")
        self.check_length(sum(map(len, texts)), self.limits.letters)
        pair, batches = self.model_for(parameters)
        if (kind := parameters.get("format") or "text") != "text":
            raise HTTPException(400, f"{kind} format is not supported")
        alternatives = number_of(parameters, "alternatives", batches.beam - 1)
        attention = is_set(parameters, "attention")
        work = translate_texts(batches, texts, alternatives + 1, attention)
        told = await unless_disconnected(request, work, self.limits.seconds)
        best = [[join(text, 0)] for text in told]
        for text, found in zip(told, best, strict=True):
            found += dict.fromkeys(join(text, rank) for rank in range(1, alternatives + 1))
        answer: dict[str, Any] = {"translatedText": [found[0] for found in best]}
        if alternatives:
            answer["alternatives"] = [[each for each in found[1:] if each != found[0]] for found in best]
        if parameters.get("source") == "auto":
            answer["detectedLanguage"] = [detected(pair[0])] * len(texts)
        if attention or is_set(parameters, "details"):
            answer["sentences"] = [[*map(described, text)] for text in told]
        return JSONResponse(answer if isinstance(q, list) else {field: value[0] for field, value in answer.items()})

    async def translate_file(self, request: Request) -> Response:
        """Translate a file, and return the URL of the result; with ``progress``, stream one line of JSON per step."""
        parameters = await self.allowed(request, FILE_FACTOR)
        filename, content = await file_of(parameters)
        pair, batches = self.model_for(parameters)
        try:
            document = await asyncio.to_thread(read_document, filename, content)
        except ValueError as error:
            raise HTTPException(400, f"Invalid request: {error}") from None
        self.check_length(sum(map(len, document.texts)), FILE_FACTOR * self.limits.letters)
        steps = self.steps(batches, document, pair[1], str(request.base_url))
        if is_set(parameters, "progress"):
            # The first step runs before the response begins, so that its errors can still set the status code.
            first = await anext(steps)

            async def lines() -> AsyncIterator[str]:
                yield json.dumps(first) + "\n"
                async for step in steps:
                    yield json.dumps(step) + "\n"

            return StreamingResponse(lines(), media_type="application/x-ndjson")

        async def last() -> dict[str, Any]:
            return [step async for step in steps][-1]

        answer = await unless_disconnected(request, last(), 3600)
        return JSONResponse(answer, 503 if "error" in answer else 200)

    async def steps(
        self, batches: Batches, document: Document, target: str, base: str
    ) -> AsyncIterator[dict[str, Any]]:
        """Translate a file in parts, yield the progress, and finally yield the result's URL or an error."""
        if self.files.locked():
            raise HTTPException(429, f"Slowdown: {FILES} files are being translated, try again later")
        async with self.files:
            sentences = await asyncio.to_thread(document.sentences)
            translations: dict[str, str] = {}
            size = min(CHUNK, batches.most)
            for start in range(0, len(sentences), size):
                yield {"done": start, "total": len(sentences)}
                chunk = sentences[start : start + size]
                try:
                    found = await asyncio.wait_for(self.patiently(batches, chunk), self.limits.seconds)
                except asyncio.TimeoutError:
                    seconds = f"{self.limits.seconds:g} seconds"
                    yield {"error": f"Translation error: no answer within {seconds}, try again later"}
                    return
                translations |= zip(chunk, (each["translations"][0]["text"] for each in found), strict=True)
            content, report = await asyncio.to_thread(document.translated, translations)
            path = Path(document.name)
            key = self.results.add(f"{path.stem}.{target}{path.suffix}", content)
            yield {"translatedFileUrl": f"{base}download_file/{quote(key)}", "report": report}

    async def patiently(self, batches: Batches, sentences: list[str]) -> list[dict[str, Any]]:
        """Translate sentences; wait while the queue is full."""
        while True:
            try:
                return await batches.translate(sentences, 1, False)
            except QueueFullError:
                await asyncio.sleep(0.5)

    async def download_file(self, request: Request) -> Response:
        """Return a translated file."""
        key = request.path_params["key"]
        if (content := self.results.get(key)) is None:
            raise HTTPException(404, "Invalid filename")
        shown = f"attachment; filename*=UTF-8''{quote(key.partition('.')[2])}"
        return Response(content, media_type="application/octet-stream", headers={"content-disposition": shown})

    async def allowed(self, request: Request, factor: int = 1) -> dict[str, Any]:
        """Return the parameters of a request, after a check of its API key."""
        # A character takes up to twelve bytes in a form, such as %f0%9f%98%80, and up to four in a file.
        parameters = await read_parameters(request, (12 if factor == 1 else 4) * factor * self.limits.letters + 10_000)
        key = parameters.get("api_key")
        if self.limits.key is not None and not hmac.compare_digest(str(key or "").encode(), self.limits.key.encode()):
            raise HTTPException(403, "Invalid API key" if key else "Please give the API key of this server")
        return parameters

    def check_length(self, letters: int, most: int) -> None:
        """Refuse texts that are too long."""
        if letters > most:
            raise HTTPException(
                413, f"Invalid request: request ({letters} characters) exceeds text limit ({most} characters)"
            )

    def model_for(self, parameters: dict[str, Any]) -> tuple[Pair, Batches]:
        """Return the model for a request, and the model's languages."""
        source, target = text_of(parameters, "source"), text_of(parameters, "target")
        if not any(target in pair for pair in self.models):
            raise HTTPException(400, f"{target} is not supported")
        if source == "auto":
            source = self.source_for(target)
        if not any(source in pair for pair in self.models):
            raise HTTPException(400, f"{source} is not supported")
        if (source, target) not in self.models:
            languages = (
                f"{name(target)} ({target}) is not available as a target language from {name(source)} ({source})"
            )
            raise HTTPException(400, languages)
        return (source, target), self.models[source, target]

    def source_for(self, target: str | None) -> str:
        """Return the source language of the models that translate to ``target``, which must all share one.

        If ``target`` is None, all models must share one source language.

        Raises:
            HTTPException: the models have several source languages, or no model translates to ``target``.
        """
        sources = sorted({pair[0] for pair in self.models if target in (None, pair[1])})
        if not sources:
            raise HTTPException(400, f"{name(str(target))} ({target}) is not available as a target language")
        if len(sources) > 1:
            raise HTTPException(400, f"auto is not supported: give the source language, one of {', '.join(sources)}")
        return sources[0]


def name(code: str) -> str:
    """Return the English name of a language, or the language's code if the name is unknown."""
    return NAMES.get(code, code)


def detected(language: str) -> dict[str, Any]:
    """Return a language in the format of ``/detect``, with confidence 0."""
    return {"confidence": 0.0, "language": language}


Told = tuple[Sentence, dict[str, Any]]


async def translate_texts(batches: Batches, texts: list[str], nbest: int, attention: bool) -> list[list[Told]]:
    """Split texts into sentences, and pair each sentence with its result of `Batches.translate`.

    An empty sentence is paired with ``{}``.
    """
    sentences = [split(text) for text in texts[: batches.most + 1]]
    flat = [each.text for text in sentences for each in text if each.text]
    # The number of texts is limited too, because blank texts contain no sentences and would escape a sentence limit.
    if (number := max(len(texts), len(flat))) > batches.most:
        raise HTTPException(413, f"Invalid request: request ({number} sentences) exceeds limit ({batches.most})")
    told = iter(await batches.translate(flat, nbest, attention))
    return [[(each, next(told) if each.text else {}) for each in text] for text in sentences]


def join(text: list[Told], rank: int) -> str:
    """Join the translations of a text's sentences.

    Each sentence contributes the translation with index ``rank``; a sentence with fewer translations contributes its
    last translation.
    """

    def parts() -> Iterator[str]:
        for sentence, told in text:
            yield sentence.before
            yield told["translations"][min(rank, len(told["translations"]) - 1)]["text"] if told else ""
            yield sentence.after

    return "".join(parts())


def described(each: Told) -> dict[str, Any]:
    """Return a sentence and its translations as JSON fields; ``lost`` lists placeholders that a translation lacks."""
    sentence, told = each
    wanted = placeholders(sentence.text)
    translations = []
    for translation in told.get("translations", []):
        lost = [*(wanted - placeholders(translation["text"])).elements()]
        translations.append({**translation, "score": round(translation["score"], 4), "lost": lost})
        if "attention" in translation:
            translations[-1]["attention"] = translation["attention"].astype(float).round(3).tolist()
    return {**sentence._asdict(), **told, "translations": translations}


async def refuse(request: Request, error: Exception) -> Response:
    """Return an error in LibreTranslate's format."""
    if isinstance(error, HTTPException):
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)
    if isinstance(error, ClientDisconnect):
        return Response(status_code=400)
    return JSONResponse({"error": "Translation error: see the server's messages"}, 500)


def make_app(models: Mapping[Pair, Batches], limits: Limits) -> Starlette:
    """Return the application, which runs the queues while the server runs."""
    api = Api(models, limits)

    def stop_server(queue: asyncio.Task[None]) -> None:
        if not queue.cancelled():  # the queue failed, for example because the system has no more threads
            print(f"serve: error: the queue of a model ended: {queue.exception()!r}", file=sys.stderr)
            signal.raise_signal(signal.SIGTERM)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        running = [asyncio.ensure_future(batches.run()) for batches in models.values()]
        for task in running:
            task.add_done_callback(stop_server)
        yield
        for task in running:
            task.cancel()

    routes = [
        Route("/translate", api.translate, methods=["POST"]),
        Route("/translate_file", api.translate_file, methods=["POST"]),
        Route("/download_file/{key}", api.download_file),
        Route("/detect", api.detect, methods=["POST"]),
        Route("/languages", api.languages),
        Route("/health", api.health),
        Route("/frontend/settings", api.settings),
        Mount("/", StaticFiles(directory=Path(__file__).with_name("page"), html=True)),
    ]
    cors = Middleware(
        CORSMiddleware, allow_origins=limits.origins, allow_methods=["GET", "POST"], allow_headers=["content-type"]
    )
    middleware = [cors] if limits.origins else []
    handlers: Any = dict.fromkeys((HTTPException, ClientDisconnect, Exception), refuse)
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=lifespan)
