"""From parallel text to subwords: reading, tokens, cleaning, merges.

Every file gets its name when it is whole, so that what was interrupted is repeated and what is finished is not.
"""

from __future__ import annotations

import gzip
import os
import re
import signal
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

from fairseq_plugins.cli.bar import bar
from fairseq_plugins.common.files import decoded, replacing
from fairseq_plugins.common.subwords import segment, without_long_words

_XML_LANG = "{http://www.w3.org/XML/1998/namespace}lang"  # TMX before 1.4 has another
BLOCK = 100_000  # lines that are handed to the workers at a time

Line = Callable[[str], str]
Pair = tuple[str, str]


@contextmanager
def writing(path: Path) -> Iterator[TextIO]:
    """A text file to write to, which gets its name at the end."""
    # Only \n ends a line, here and when reading: text may hold what else Python takes for an end.
    with replacing(path) as beside, beside.open("w", encoding="utf-8", newline="\n") as file:
        yield file


def read_text(path: Path, language: str, errors: str = "strict") -> Iterator[str]:
    """Read the sentences of a file, gzipped or not, in the format that its name tells.

    ``.sgm`` and ``.xml`` have a sentence in each ``<seg>`` (one a line, as those of WMT and IWSLT), ``.tmx`` one of
    each language in every ``<tu>``, ``train.tags.*`` (IWSLT) lines between others that say what the talk is.  All else
    is one sentence a line.

    Raises:
        ValueError: the file is not UTF-8, or not what its name says.
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
                    # Searched for, a pattern would try each of many beginnings up to the end of the line.
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
            raise ValueError(f"{path}: {error}") from error


def _units(file: Any, path: Path, language: str) -> Iterator[str]:
    """The sentences of a translation memory, in a language (``en``) or one of its regions (``en-US``).

    A unit without one gives an empty one.  What is marked as code of a file's format is no text.
    """
    language = language.lower().replace("_", "-")
    for element in _elements(file, path):
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


def _elements(file: Any, path: Path) -> Iterator[ElementTree.Element]:
    """The elements of an XML file, each at its end.

    Raises:
        ValueError: it is not XML, in no encoding of text, or refers to text that it does not hold.
    """
    try:
        for _, element in ElementTree.iterparse(file):
            yield element
    except (
        ElementTree.ParseError,
        LookupError,
        ValueError,
    ) as error:  # the latter two from Python's codecs
        raise ValueError(f"{path} is not readable as XML: {error}") from error


class _Worker:
    function: Line


def _start(make: Callable[[], Line]) -> None:
    # A stop is the business of the process that has started this one and ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _Worker.function = make()
    # Without it, one whose parent was killed would wait for work, and keep what it has inherited of it: a lock.
    Thread(target=_end_with, args=(parent_process(),), daemon=True).start()


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _apply(line: str) -> str:
    return _Worker.function(line)


def each_line(make: Callable[[], Line], lines: Iterable[str], workers: int) -> Iterator[str]:
    """What the function that ``make`` makes gives for each line, in their order, by several processes.

    Raises:
        ValueError: one of them has been killed.
    """
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
                "a process that prepares text was killed; if memory had ended, take fewer --workers"
            ) from None


def moses(language: str, dashes: bool = True, normalise: bool = False, lowercase: bool = False) -> Line:
    """Moses' tokeniser, as fairseq's ``--tokenizer moses`` runs it.

    Args:
        dashes: separate dashes inside words, marked ``@-@``.
        normalise: bring punctuation into one form first.
        lowercase: afterwards.
    """
    from sacremoses import MosesPunctNormalizer, MosesTokenizer  # noqa: PLC0415  (half a second)

    tokenizer, normalizer = MosesTokenizer(language), MosesPunctNormalizer(language)

    def tokenise(line: str) -> str:
        if normalise:
            line = normalizer.normalize(line)
        tokens = str(tokenizer.tokenize(line, aggressive_dash_splits=dashes, return_str=True))
        return tokens.lower() if lowercase else tokens

    return tokenise


def concatenate(paths: Iterable[Path], output: Path, language: str) -> None:
    """The sentences of several files, one a line."""
    with writing(output) as file:
        for path in paths:
            file.writelines(line + "\n" for line in read_text(path, language))


def read_pairs(source: Path, target: Path) -> Iterator[Pair]:
    """The lines of two plain files.

    Raises:
        ValueError: one has more lines.
    """
    with source.open(encoding="utf-8", newline="\n") as first, target.open(encoding="utf-8", newline="\n") as second:
        for number, (left, right) in enumerate(zip_longest(first, second), start=1):
            if left is None or right is None:
                raise ValueError(
                    f"{source if left is None else target} ends before line {number} of the other language"
                )
            yield left.rstrip("\n"), right.rstrip("\n")


def clean(pairs: Iterable[Pair], max_words: int, max_ratio: float | None) -> Iterator[Pair]:
    """The pairs of which neither side is empty or has more words, or ``max_ratio`` times as many as the other."""
    for source, target in pairs:
        short, long = sorted((len(source.split()), len(target.split())))
        if short and long <= max_words and (max_ratio is None or long <= max_ratio * short):
            yield source, target


def split(pairs: Iterable[Pair], every: int | None, outputs: dict[str, tuple[Path, Path]]) -> None:
    """Write every so many-th pair to ``outputs["valid"]``, and the others (all, if None) to ``outputs["train"]``."""
    with ExitStack() as stack:
        files = {part: [stack.enter_context(writing(path)) for path in paths] for part, paths in outputs.items()}
        for number, pair in enumerate(bar(pairs, desc="clean and split", unit=" pairs"), start=1):
            part = "valid" if every is not None and number % every == 0 else "train"
            for file, line in zip(files[part], pair, strict=True):
                file.write(line + "\n")


def learn_codes(paths: Sequence[Path], merges: int, output: Path) -> None:
    """One BPE (Sennrich et al. 2016) of all files together.

    Raises:
        ValueError: no word of theirs has two letters.
    """
    with ExitStack() as stack, writing(output) as file:
        texts = [stack.enter_context(path.open(encoding="utf-8", newline="\n")) for path in paths]
        lines = bar(chain(*texts), desc="count words", unit=" lines")
        try:
            learn_bpe((without_long_words(line) for line in lines), file, merges)
        except ValueError as error:  # subword-nmt's, of the most frequent of no pairs
            names = " and ".join(map(str, paths))
            raise ValueError(f"{names} have no word of two letters, so there is no BPE to learn") from error


def segmenter(codes: Path) -> Line:
    """What segments a line of words by these codes.

    Raises:
        ValueError: they are none of subword-nmt.
    """
    said = StringIO()
    with codes.open(encoding="utf-8") as file, redirect_stderr(said):
        try:
            bpe = BPE(file)
            bpe.process_line("xy")  # which tells whether it knows their version
        except (Exception, SystemExit) as error:  # subword-nmt prints a reason and ends the process
            reason = " ".join(said.getvalue().split()) or str(error) or type(error).__name__
            raise ValueError(f"{codes} holds no BPE codes of subword-nmt: {reason[:300]}") from error
    return partial(segment, bpe)


def apply_codes(codes: Path, path: Path, output: Path, workers: int) -> None:
    """Segment a tokenised file."""
    with path.open(encoding="utf-8", newline="\n") as lines, writing(output) as file:
        stripped = (line.rstrip("\n") for line in bar(lines, desc=f"segment {output.name}", unit=" lines"))
        file.writelines(f"{line}\n" for line in each_line(partial(segmenter, codes), stripped, workers))
