"""Steps from parallel text to subwords: reading, tokenising, cleaning, BPE.

A file has a temporary name until it is complete, so a resumed call repeats only unfinished steps.
"""

from __future__ import annotations

import gzip
import os
import re
import signal
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, redirect_stderr
from functools import partial
from io import StringIO
from itertools import chain, islice, zip_longest
from multiprocessing import parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from typing import Any, TextIO
from xml.etree import ElementTree

from subword_nmt.apply_bpe import BPE
from subword_nmt.learn_bpe import learn_bpe
from tqdm import tqdm

from fairseq_plugins.common.files import decoded, replacing
from fairseq_plugins.common.text import segment, without_long_words

_XML_LANG = "{http://www.w3.org/XML/1998/namespace}lang"  # TMX before 1.4 has another attribute for the language.
BLOCK = 100_000  # maximum number of lines in the workers' queue

Line = Callable[[str], str]
Pair = tuple[str, str]


def bar(items: Iterable[Any] | None = None, *, desc: str, **options: Any) -> Any:
    """Return a ``tqdm`` bar; if stderr is not a terminal, print the text of ``desc`` once instead of the bar."""
    if not sys.stderr.isatty():
        print(desc, file=sys.stderr, flush=True)
    return tqdm(items, desc=desc, disable=None, **options)


@contextmanager
def writing(path: Path) -> Iterator[TextIO]:
    """Open a text file for writing; the file has a temporary name until it is complete."""
    # Only \n ends a line, because text may contain other characters that Python treats as line ends.
    with replacing(path) as beside, beside.open("w", encoding="utf-8", newline="\n") as file:
        yield file


def read_text(path: Path, language: str, errors: str = "strict") -> Iterator[str]:
    """Read the sentences of a plain or gzipped file.  The file's name determines the format.

    ``.sgm`` and ``.xml`` (WMT, IWSLT) have one ``<seg>`` per line, with one sentence.  ``.tmx`` has one sentence per
    language in each ``<tu>``.  ``train.tags.*`` (IWSLT) mixes sentences with lines about the talk.  Other files have
    one sentence per line.
    """
    name = path.name.lower().removesuffix(".gz")
    with gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb") as file:
        try:
            if name.endswith(".tmx"):
                yield from _units(file, path, language)
                return
            lines = (line.rstrip("\r\n") for line in decoded(file, path, errors))
            if name.endswith((".sgm", ".xml")):
                for line in lines:
                    # A regular expression for the whole element would need quadratic time if many <seg> were not
                    # closed.
                    text, end, _ = line.partition("<seg")[2].partition(">")[2].partition("</seg>")
                    if end:
                        yield " ".join(text.split())
            elif name.startswith("train.tags."):
                for line in lines:
                    if not re.search("<(url|talkid|keywords)>", line):
                        yield re.sub("</?(title|description)>", "", line)
            else:
                yield from lines
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise ValueError(f"{path} is not a complete gzip file: {error}; copy or compress it again") from error


def _units(file: Any, path: Path, language: str) -> Iterator[str]:
    """Yield the sentences of a translation memory in a language (``en``) or a regional variety of it (``en-US``).

    A translation unit without the language yields an empty sentence.  Inline codes are skipped.
    """
    language = language.lower().replace("_", "-")
    try:
        for _, element in ElementTree.iterparse(file):
            name = element.tag.rpartition("}")[2]
            if name in {"bpt", "ept", "ph", "it", "ut"}:
                behind = element.tail
                element.clear()
                element.tail = behind
            elif name == "tu":
                sides = {
                    str(side.get(_XML_LANG) or side.get("lang")).lower().replace("_", "-"): "".join(segment.itertext())
                    for side in element.iterfind("{*}tuv")
                    for segment in side.iterfind("{*}seg")
                }
                regions = (text for name, text in sides.items() if name.partition("-")[0] == language)
                yield " ".join(sides.get(language, next(regions, "")).split())
                element.clear()
    except (ElementTree.ParseError, LookupError, ValueError) as error:  # codecs raise LookupError or ValueError
        raise ValueError(f"{path} is not valid XML: {error}; repair the file") from error


_worker: list[Line] = []  # the function that this worker process applies to lines


def _start(make: Callable[[], Line]) -> None:
    # Workers ignore Ctrl-C: the parent handles it and ends them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _worker.append(make())
    # Without this thread, a worker whose parent was killed would wait forever and keep the inherited lock.
    Thread(target=_end_with, args=(parent_process(),), daemon=True).start()


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _apply(line: str) -> str:
    return _worker[0](line)


def each_line(make: Callable[[], Line], lines: Iterable[str], workers: int) -> Iterator[str]:
    """Apply the function returned by ``make`` to each line, in order, in several processes."""
    if workers <= 1:
        yield from map(make(), lines)
        return
    rest = iter(lines)
    with ProcessPoolExecutor(workers, initializer=_start, initargs=(make,)) as pool:
        try:
            while block := list(islice(rest, BLOCK)):
                yield from pool.map(_apply, block, chunksize=1000)
        except BrokenProcessPool:
            raise ValueError(
                "--workers: a worker process was killed, perhaps for lack of memory; use fewer --workers"
            ) from None


def moses(language: str) -> Line:
    """Return Moses' tokenizer for a language, configured like fairseq's ``--tokenizer moses``."""
    from sacremoses import MosesTokenizer  # noqa: PLC0415  (takes half a second to import)

    return partial(MosesTokenizer(language).tokenize, aggressive_dash_splits=True, return_str=True)


def read_pairs(
    source: Path, target: Path, *, languages: tuple[str, str] = ("", ""), errors: str = "strict"
) -> Iterator[Pair]:
    """Yield the sentence pairs of two files, which `read_text` reads."""
    lines = [0, 0]
    for left, right in zip_longest(read_text(source, languages[0], errors), read_text(target, languages[1], errors)):
        if left is not None and right is not None:
            yield left, right
        lines = [lines[0] + (left is not None), lines[1] + (right is not None)]
    if lines[0] != lines[1]:
        raise ValueError(f"{source} has {lines[0]} lines and {target} has {lines[1]}: give line-aligned files")


def learn_codes(paths: Sequence[Path], merges: int, output: Path) -> None:
    """Learn one BPE (Sennrich et al. 2016) from all files."""
    with ExitStack() as stack, writing(output) as file:
        texts = [stack.enter_context(path.open(encoding="utf-8", newline="\n")) for path in paths]
        lines = bar(chain(*texts), desc="count words", unit=" lines")
        try:
            learn_bpe((without_long_words(line) for line in lines), file, merges)
        except ValueError as error:  # without pairs of letters, subword-nmt calls max() on an empty list
            names = " and ".join(map(str, paths))
            raise ValueError(f"{names}: cannot learn BPE, because no word has two letters; give more text") from error


def segmenter(codes: Path) -> Line:
    """Return a function that segments a line of words by BPE codes."""
    said = StringIO()
    with codes.open(encoding="utf-8") as file, redirect_stderr(said):
        try:
            bpe = BPE(file)
            bpe.process_line("xy")  # subword-nmt raises SystemExit for an unknown version of the codes
        except (Exception, SystemExit) as error:  # subword-nmt prints a reason and calls sys.exit
            reason = " ".join(said.getvalue().split()) or str(error) or type(error).__name__
            raise ValueError(f"{codes} has no BPE codes of subword-nmt: {reason[:300]}; give another file") from error
    return partial(segment, bpe)


def apply_codes(codes: Path, path: Path, output: Path, workers: int) -> None:
    """Segment a tokenised file."""
    with path.open(encoding="utf-8", newline="\n") as lines, writing(output) as file:
        stripped = (line.rstrip("\n") for line in bar(lines, desc=f"segment {output.name}", unit=" lines"))
        file.writelines(f"{line}\n" for line in each_line(partial(segmenter, codes), stripped, workers))
