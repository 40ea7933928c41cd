"""Extract a bilingual lexicon from parallel text, aligned by eflomal.

lexicon writes dictionary.txt (the likeliest translation of each source word, for --replace-unk), candidates.txt (likely
translations with probabilities) and frequent.txt (target words by frequency).  eflomal has no seed, so two runs
differ slightly.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory

from fairseq_plugins.cli.arguments import positive
from fairseq_plugins.cli.parallel_text import bar, writing
from fairseq_plugins.cli.processes import running
from fairseq_plugins.common.files import naming, refuse_input_as_output

FILES = ("dictionary.txt", "candidates.txt", "frequent.txt")
REINSTALL = "reinstall eflomal"
LONGEST = 1023  # maximum number of words in a sentence; eflomal treats longer sentences as empty


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--source",
        type=Path,
        required=True,
        metavar="FILE",
        help="source sentences, one per line, segmented like the input of fairseq-preprocess",
    )
    parser.add_argument(
        "--target", type=Path, required=True, metavar="FILE", help="translation of each source sentence"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for the three output files")
    parser.add_argument(
        "--max-candidates",
        type=positive,
        default=100,
        metavar="K",
        help="maximum number of translations of each source word in candidates.txt (default: %(default)s)",
    )


def run(args: Namespace) -> None:
    """Align the text and write the lexicon; existing files are replaced only at the end."""
    if args.output.exists() and not args.output.is_dir():
        raise ValueError(f"--output {args.output}: not a folder; choose another path")
    for path in (args.source, args.target):
        path.stat()  # a missing file is reported before the alignment
    outputs = [args.output / name for name in FILES]
    for path in outputs:
        refuse_input_as_output(path, [args.source, args.target])
    aligner = find_aligner()
    with ExitStack() as stack:
        work = Path(stack.enter_context(TemporaryDirectory()))
        with naming(work):
            pairs, frequency = copy_text(args.source, args.target, work)
        # The files are opened before the alignment, which may take hours, so that a read-only folder is found early.
        files = [stack.enter_context(writing(path)) for path in outputs]
        with naming(work):
            align(aligner, work)
            links = count_links(work, pairs)
        for path, file, lines in zip(outputs, files, contents(links, frequency, args.max_candidates), strict=True):
            with naming(path):
                file.writelines(lines)
                file.flush()  # all files are complete before the first is renamed
    print(f"{args.output}: {len(links)} source types and {len(frequency)} target types from {pairs} sentence pairs")


def find_aligner() -> str:
    """Return the path of eflomal's command, in this environment or on the PATH.

    eflomal's licence is the GPL, so it runs as a separate program and is never imported.
    """
    # An empty entry of PATH means the working folder, whose programs are not trusted.
    path = [folder for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    aligner = shutil.which("eflomal-align", path=os.pathsep.join([str(Path(sys.executable).parent), *path]))
    if aligner is None:
        raise ValueError("eflomal-align is not installed: pip install --no-build-isolation eflomal")
    return aligner


def copy_text(source: Path, target: Path, work: Path) -> tuple[int, Counter[str]]:
    """Copy both sides to the files ``source`` and ``target`` in ``work``, with single spaces between words.

    Returns:
        The number of sentence pairs, and the frequency of each target word.
    """
    pairs = too_long = 0
    frequency: Counter[str] = Counter()
    with (
        (work / "source").open("w", encoding="utf-8") as sources,
        (work / "target").open("w", encoding="utf-8") as targets,
    ):
        for source_words, target_words in bar(read_word_pairs(source, target), desc="read", unit=" pairs"):
            print(*source_words, file=sources)
            print(*target_words, file=targets)
            frequency.update(target_words)
            pairs += 1
            too_long += max(len(source_words), len(target_words)) > LONGEST
    if not pairs:
        raise ValueError(f"{source} and {target} have no sentences: give parallel text")
    if too_long:
        print(f"skipped pairs of more than {LONGEST} words: {too_long} of {pairs}", file=sys.stderr)
    return pairs, frequency


def read_word_pairs(source: Path, target: Path) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the words of each pair of lines; skip pairs of empty lines."""
    sides = read(source), read(target)
    for number, (source_words, target_words) in enumerate(zip_longest(*sides), 1):
        if source_words is None or target_words is None:
            longer, shorter = (source, target) if target_words is None else (target, source)
            lines = number + sum(1 for _ in sides[longer is target])
            raise ValueError(f"{longer} has {lines} lines and {shorter} has {number - 1}: give line-aligned files")
        if bool(source_words) != bool(target_words):
            empty, other = (target, source) if source_words else (source, target)
            raise ValueError(f"{empty}, line {number}: empty, but {other} has words in this line; remove the pair")
        if source_words:
            yield source_words, target_words


def read(path: Path) -> Iterator[list[str]]:
    """Split each line into words, as fairseq does."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                text = line.decode("utf-8")  # fairseq keeps a byte order mark as a part of the first word
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}, line {number}: invalid UTF-8, convert the file: {error}") from error
            # Plain fairseq ends a line at every carriage return, so a carriage return inside a line would misalign all
            # later pairs.
            if "\r" in text.removesuffix("\n").removesuffix("\r"):
                raise ValueError(f"{path}, line {number}: a carriage return inside the line; remove it")
            if "\0" in text:
                raise ValueError(f"{path}, line {number}: a NUL character; give a text file")
            yield text.split()


def align(aligner: str, work: Path) -> None:
    """Align the files ``source`` and ``target`` in ``work``, and write ``forward`` and ``reverse`` in ``work``."""
    command = [aligner, "--verbose", "--source", str(work / "source"), "--target", str(work / "target")]
    command += ["--forward-links", str(work / "forward"), "--reverse-links", str(work / "reverse")]
    last: deque[str] = deque(maxlen=5)
    iterations = 0
    with (
        running(command, stderr=subprocess.PIPE, errors="replace") as process,
        bar(total=0, desc="align", unit=" iterations") as progress,
    ):
        assert process.stderr is not None  # mypy does not infer that PIPE creates this stream
        for line in process.stderr:
            last.append(line)
            if found := re.search(r" -1 (\d+) -2 (\d+) -3 (\d+) ", line):  # iterations of eflomal's three models
                progress.total = 2 * sum(map(int, found.groups()))  # both directions
            elif found := re.match(r"Aligning with model \d \((\d+) iterations\)", line):
                iterations = int(found[1])
            elif line.startswith("Done"):
                progress.update(iterations)
    if process.returncode:
        raise ValueError(
            f"eflomal-align failed with status {process.returncode}; free memory or {REINSTALL}. Its last lines:\n"
            f"{''.join(last).rstrip()}"
        )


def count_links(work: Path, pairs: int) -> dict[str, Counter[str]]:
    """Count the links of each source word to each target word.

    The counts of both alignment directions are summed.  Candidates from this sum cover as many words of held-out
    translations as candidates from the union of both directions.  Candidates from one direction, from the intersection
    or from grow-diag cover fewer words.
    """
    links: defaultdict[str, Counter[str]] = defaultdict(Counter)
    with ExitStack() as stack:
        names = ("source", "target", "forward", "reverse")
        files = [stack.enter_context((work / name).open(encoding="utf-8", errors="replace")) for name in names]
        rows = bar(zip_longest(*files), desc="count", total=pairs, unit=" pairs")
        for number, (source, target, forward, reverse) in enumerate(rows, start=1):
            if None in (source, forward, reverse):
                raise ValueError(
                    f"eflomal-align: did not write one line for each of {pairs} sentence pairs; {REINSTALL}"
                )
            source_words, target_words = source.split(), target.split()
            for link in forward.split() + reverse.split():
                try:
                    i, j = map(int, link.split("-"))
                    links[source_words[i]][target_words[j]] += 1
                except (ValueError, IndexError):
                    raise ValueError(
                        f"eflomal-align: line {number} has the link {link!r}, expected i-j with i below "
                        f"{len(source_words)} and j below {len(target_words)}; {REINSTALL}"
                    ) from None
    if not links:
        raise ValueError("eflomal-align linked no words: give more text, and check that it is parallel")
    return dict(links)


def contents(links: Mapping[str, Counter[str]], frequency: Counter[str], max_candidates: int) -> list[Iterable[str]]:
    """Return the lines of the three output files; equally likely translations are sorted by frequency."""
    ranking = sorted(frequency, key=lambda word: (-frequency[word], word))
    rank = {word: position for position, word in enumerate(ranking)}
    targets = {
        source: sorted(counts, key=lambda word: (-counts[word], rank[word])) for source, counts in sorted(links.items())
    }
    return [
        (f"{source} {best}\n" for source, (best, *_) in targets.items()),
        (
            f"{source} {target} {links[source][target] / links[source].total():.6g}\n"
            for source, best in targets.items()
            for target in best[:max_candidates]
        ),
        (f"{word} {frequency[word]}\n" for word in ranking),
    ]
