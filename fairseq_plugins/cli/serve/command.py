"""Serve exported models over HTTP, with LibreTranslate's API and a web page.

Sentences of different callers are translated in the same batches.  On SIGTERM and Ctrl-C, the server first answers all
accepted requests and then exits.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import socket
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from fairseq_plugins.cli.arguments import positive
from fairseq_plugins.cli.own_data.folder import SETTINGS

if TYPE_CHECKING:
    from fairseq_plugins.cli.serve.batches import Pair
    from fairseq_plugins.export.translate import Translator

PACKAGES = ("httptools", "onnxruntime", "python_multipart", "starlette", "uvicorn", "uvloop")


def add_arguments(parser: ArgumentParser) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument(
        "folders",
        nargs="+",
        metavar="OUT",
        help="exported folder, or own-data's folder that contains one; en:de=OUT names the languages, if the data has "
        "other names for them, such as src and tgt",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (default: %(default)s)")
    parser.add_argument(
        "--port", type=_port, default=8000, metavar="N", help="port; 0 chooses a free port (default: %(default)s)"
    )
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="file with the API key that callers must send"
    )
    parser.add_argument(
        "--cors",
        nargs="+",
        default=[],
        metavar="ORIGIN",
        help="origins whose web pages may call the server; * allows all",
    )
    parser.add_argument(
        "--threads",
        type=positive,
        default=cores,
        metavar="N",
        help="number of batches that are translated in parallel (default: %(default)s)",
    )
    parser.add_argument("--beam", type=positive, default=5, metavar="N", help="beam size (default: %(default)s)")
    parser.add_argument(
        "--max-letters",
        type=positive,
        default=100_000,
        metavar="N",
        help="largest number of characters per request (default: %(default)s)",
    )
    parser.add_argument(
        "--max-waiting",
        type=positive,
        default=2000,
        metavar="N",
        help="largest number of sentences in the queue (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout",
        type=positive,
        default=60,
        metavar="SECONDS",
        help="time limit of an answer in seconds (default: %(default)s)",
    )


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise ArgumentTypeError(f"must be 0 to 65535, got {text!r}")
    return int(text)


def run(args: Namespace) -> None:
    """Serve until a signal stops the server."""
    key = None
    if args.api_key_file is not None:
        try:
            key = args.api_key_file.read_text(encoding="utf-8-sig").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"--api-key-file {args.api_key_file}: {error}; give a file that contains the key"
            ) from None
        if not key:
            raise ValueError(f"--api-key-file {args.api_key_file}: the file is empty; write the key to it")
    for origin in args.cors:
        if origin != "*" and not re.fullmatch(r"https?://[^/]+", origin):
            raise ValueError(f"--cors {origin}: not an origin; give a scheme and a host, as in https://example.org")
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise ValueError(f"serve needs {', '.join(missing)}: pip install 'fairseq_plugins[serve]'")
    import uvloop  # noqa: PLC0415  (an optional package; the next modules import others)

    from fairseq_plugins.cli.serve.app import Limits  # noqa: PLC0415
    from fairseq_plugins.cli.serve.server import serve  # noqa: PLC0415

    models = open_models(args.folders)
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    try:
        listening = socket.create_server((args.host, args.port), family=family, backlog=2048)
    except OSError as error:
        raise OSError(
            error.errno or errno.EADDRINUSE,
            f"--host {args.host} --port {args.port}: {error.strerror}; choose another port or host",
        ) from None
    limits = Limits(key, args.max_letters, args.timeout, args.cors)
    sys.setswitchinterval(0.0005)  # Threads that translate must not delay the thread that answers requests.
    # The server runs in uvloop's event loop.  When the translating threads use all cores, asyncio's own event loop
    # answers requests too slowly to keep batches full.
    uvloop.run(serve(models, limits, listening, args.threads, args.beam, args.max_waiting))


def open_models(places: Iterable[str]) -> dict[Pair, Translator]:
    """Load the model of each folder, and return a dictionary from source and target language to model.

    Args:
        places: folders, optionally with languages, as in ``en:de=OUT``.
    """
    from fairseq_plugins.export.translate import Translator  # noqa: PLC0415  (sets up the process for onnxruntime)

    models: dict[Pair, Translator] = {}
    for place in places:
        given = re.fullmatch(r"([\w-]+):([\w-]+)=(.+)", place)
        folder = find_exported(Path(given[3] if given else place))
        translator = Translator(folder, threads=1)
        languages = [given[1], given[2]] if given else translator.config["languages"]
        if languages is None:
            raise ValueError(f"{folder} does not name its languages: give them, as in en:de={folder}")
        pair = languages[0], languages[1]
        if pair in models:
            raise ValueError(
                f"{folder} and {models[pair].folder} both translate {pair[0]} to {pair[1]}: give one of them"
            )
        models[pair] = translator
    return models


def find_exported(folder: Path) -> Path:
    """Return ``folder`` if it is an exported model; if own-data created ``folder``, return the exported model in it."""
    if not (folder / SETTINGS).is_file():
        if not (folder / "SHA256SUMS").exists():
            raise ValueError(f"{folder} is not an exported folder: create one with fairseq-plugins export")
        return folder
    found = sorted(path.parent for path in folder.glob("*/SHA256SUMS"))
    if not found:
        command = shlex.join(["fairseq-plugins", "export", str(folder), str(folder / "exported")])
        raise ValueError(f"{folder} has no exported folder: export its model with {command}")
    if len(found) > 1:
        raise ValueError(f"{folder} has several exported folders: give one of {', '.join(map(str, found))}")
    return found[0]
