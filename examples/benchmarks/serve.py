#!/usr/bin/env python3
"""Compare the throughput of `fairseq-plugins serve` with that of large batches, for the same exported model.

Each round first translates all lines of a text in this process, as translate.py does.  Then concurrent callers send the
same lines to the server, one line per request; each caller waits for an answer before its next request.  The script
counts the lines with equal translations.  Only lines of one sentence are compared, because the server translates each
sentence of a line separately.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
from itertools import islice
from pathlib import Path
from statistics import quantiles
from time import perf_counter
from urllib.parse import urlsplit

from fairseq_plugins.cli.serve.parameters import split
from fairseq_plugins.export.translate import Translator


async def send(url: str, lines: list[str], languages: list[str], callers: int) -> tuple[list[str], list[float]]:
    """Return the translations of lines by a server, and the milliseconds of each request."""
    address, waiting = urlsplit(url), iter(enumerate(lines))
    translations, milliseconds = [""] * len(lines), [0.0] * len(lines)

    async def caller() -> None:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        for place, line in waiting:
            body = json.dumps({"q": line, "source": languages[0], "target": languages[1]}).encode()
            began = perf_counter()
            head = b"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            writer.write(b"%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body))
            head = await reader.readuntil(b"\r\n\r\n")
            size = re.search(rb"content-length: (\d+)", head)
            answer = json.loads(await reader.readexactly(int(size[1]) if size else 0))
            milliseconds[place] = 1000 * (perf_counter() - began)
            translations[place] = answer["translatedText"]
        writer.close()

    await asyncio.gather(*(caller() for _ in range(callers)))
    return translations, milliseconds


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="OUT", help="exported folder that records its languages")
    parser.add_argument("--input", type=Path, required=True, metavar="FILE", help="text with one line per request")
    parser.add_argument("--sentences", type=int, default=1000, metavar="N", help="number of lines")
    parser.add_argument("--callers", type=int, default=32, metavar="N", help="number of concurrent callers")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="batches translated in parallel")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="number of rounds")
    args = parser.parse_args()
    with args.input.open(encoding="utf-8", newline="\n") as text:
        lines = [line for each in islice(text, args.sentences) if (line := each.strip())]
    random.Random(1).shuffle(lines)
    translator = Translator(args.folder, threads=1, batches=args.threads)
    command = [sys.executable, "-c", "from fairseq_plugins.cli.main import main; main()", "serve", args.folder]
    command += ["--threads", str(args.threads), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[-1]
            print("| folder, s | server, s | throughput | median, ms | 99 %, ms | equal |\n|---|---|---|---|---|---|")
            for _ in range(args.rounds):
                began = perf_counter()
                expected = translator.translate(lines)
                middle = perf_counter()
                languages = translator.config["languages"]
                found, milliseconds = asyncio.run(send(url, lines, languages, args.callers))
                own, served = middle - began, perf_counter() - middle
                equal = [a == b for line, a, b in zip(lines, expected, found, strict=True) if len(split(line)) == 1]
                median, highest = (quantiles(milliseconds, n=100, method="inclusive")[at] for at in (49, 98))
                speed = f"{own:.2f} | {served:.2f} | {own / served:.0%} | {median:.0f} | {highest:.0f}"
                print(f"| {speed} | {sum(equal)} of {len(equal)} |", flush=True)
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
