"""``fairseq-plugins serve``: translate over HTTP, for programs and on a page, with exported folders.

The API is LibreTranslate's. Sentences of all callers are translated together. SIGTERM and Ctrl-C end the server when
it has answered all requests that it has accepted.
"""

from __future__ import annotations

import asyncio
import errno
import os
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
        help="exported folder, or folder of own-data that holds one; en:de=OUT if it does not name its languages",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    parser.add_argument("--port", type=_port, default=8000, metavar="N", help="0 for any (default: %(default)s)")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="file of the key that callers must give")
    parser.add_argument(
        "--cors", nargs="+", default=[], metavar="ORIGIN", help="other pages that may call it, * for all"
    )
    parser.add_argument(
        "--threads", type=positive, default=cores, metavar="N", help="batches at a time (default: %(default)s)"
    )
    parser.add_argument("--beam", type=positive, default=5, metavar="N", help="hypotheses (default: %(default)s)")
    parser.add_argument(
        "--max-letters", type=positive, default=100_000, metavar="N", help="letters of a request (default: %(default)s)"
    )
    parser.add_argument(
        "--max-waiting", type=positive, default=2000, metavar="N", help="sentences in the queue (default: %(default)s)"
    )
    parser.add_argument(
        "--timeout", type=positive, default=60, metavar="SECONDS", help="for an answer (default: %(default)s)"
    )


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise ArgumentTypeError(f"expected a number from 0 to 65535, got {text!r}")
    return int(text)


def run(args: Namespace) -> None:
    """Serve until a signal.

    Raises:
        ValueError: a folder cannot be used, or a package is missing.
        OSError: a file cannot be read, or the address is not free.
    """
    for place in args.folders:
        folder = Path(place if Path(place).exists() else place.partition("=")[2] or place)
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder}")
    key = None
    if args.api_key_file is not None and not (key := args.api_key_file.read_text(encoding="utf-8").strip()):
        raise ValueError(f"--api-key-file: {args.api_key_file} is empty: write the key into it")
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise ValueError(f"this needs {', '.join(missing)}: pip install 'fairseq_plugins[serve]'")
    from fairseq_plugins.cli.serve.app import Limits  # noqa: PLC0415  (of packages that may be missing)
    from fairseq_plugins.cli.serve.models import open_models  # noqa: PLC0415
    from fairseq_plugins.cli.serve.server import serve  # noqa: PLC0415

    models = open_models(args.folders)
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    try:
        listening = socket.create_server((args.host, args.port), family=family, backlog=2048)
    except OSError as error:
        raise OSError(
            error.errno or errno.EADDRINUSE, f"--host {args.host} --port {args.port}: {error.strerror}"
        ) from None
    limits = Limits(key, args.max_letters, args.timeout, args.cors)
    sys.setswitchinterval(0.0005)  # so that threads that translate do not hold up the one that answers
    asyncio.run(serve(models, limits, listening, args.threads, args.beam, args.max_waiting))
