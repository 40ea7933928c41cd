"""Serve exported models over HTTP, with LibreTranslate's API and a web page.

Sentences of different callers are translated in the same batches.  On SIGTERM and Ctrl-C, the server first answers all
accepted requests and then exits.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from importlib.util import find_spec
from pathlib import Path

from fairseq_plugins.cli.arguments import positive

PACKAGES = ("httptools", "onnxruntime", "python_multipart", "starlette", "uvicorn")


def add_arguments(parser: ArgumentParser) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument(
        "folders",
        nargs="+",
        metavar="OUT",
        help="exported folder, or own-data's folder that contains one; write en:de=OUT if the folder does not record "
        "its languages",
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
    """Serve until a signal.

    Raises:
        ValueError: a folder is not usable, or a package is missing.
        OSError: a file cannot be read, or the address is in use.
    """
    for place in args.folders:
        folder = Path(place if Path(place).exists() else place.partition("=")[2] or place)
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder: give an exported folder")
    key = None
    if args.api_key_file is not None:
        try:
            key = args.api_key_file.read_text(encoding="utf-8").strip()
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
    from fairseq_plugins.cli.serve.app import Limits  # noqa: PLC0415  (imports optional packages)
    from fairseq_plugins.cli.serve.models import open_models  # noqa: PLC0415
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
    sys.setswitchinterval(0.0005)  # Translating threads must not delay the thread that answers requests.
    asyncio.run(serve(models, limits, listening, args.threads, args.beam, args.max_waiting))
