"""Prepare the data of a paper's experiment: download, tokenise, segment and binarise it.

``python examples/prepare EXPERIMENT OUT`` writes all results to the folder OUT.  Run the same command again to resume
after an interruption, even in the middle of a download.
"""

from __future__ import annotations

import gzip
import random
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from corpus import Corpus, needed_files, prepare
from experiments import CORPORA

from fairseq_plugins.cli.arguments import positive
from fairseq_plugins.cli.processes import stoppable
from fairseq_plugins.common.files import replacing, work_in

LARGEST_MINIATURE_BPE = 30  # merges


def main() -> None:
    parser = ArgumentParser(prog="prepare", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=sorted(CORPORA), help="experiment: the name of a folder in examples/")
    parser.add_argument("output", type=Path, metavar="OUT", help="folder for all results")
    parser.add_argument(
        "--orig", type=Path, metavar="DIR", help="folder with files that are already downloaded (default: OUT/orig)"
    )
    parser.add_argument("--words", action="store_true", help="write data-bin-words, whose tokens are whole words")
    parser.add_argument(
        "--workers", type=positive, default=1, metavar="N", help="number of processes (default: %(default)s)"
    )
    parser.add_argument("--smoke", action="store_true", help="use small invented files instead of downloads")
    args = parser.parse_args()
    try:
        with stoppable():
            run(args)
    except (ValueError, OSError) as error:
        sys.exit(f"prepare: error: {error}")


def run(args: Namespace) -> None:
    """Prepare one experiment.

    Raises:
        ValueError: options contradict each other, a file is missing or has unexpected content, or another
            process works in the folder.
        OSError: a download fails.
    """
    corpus, orig = CORPORA[args.experiment], args.orig or args.output / "orig"
    if args.smoke and args.orig:
        raise ValueError(f"--smoke: uses invented files, not the files in --orig {args.orig}; remove one option")
    # A missing folder is refused, because a mistyped name would start a download of gigabytes. The folder may
    # be missing only if all its files have already been read.
    if args.orig and not args.orig.is_dir() and needed_files(corpus, args.output, args.words):
        raise ValueError(f"--orig: {args.orig} is not a folder; create it, or remove the option")
    with work_in(args.output):
        if args.smoke:
            orig = args.output / "orig-miniature"
            write_miniature(corpus, orig)
            merges = corpus.merges and LARGEST_MINIATURE_BPE
            # The file `settings` in the folder records the fields of the corpus, such as `terms`. The value "made up"
            # distinguishes this record from the record of the real corpus, so a later run without --smoke refuses the
            # folder.
            corpus = replace(corpus, merges=merges, terms="made up")
        print(prepare(corpus, args.output, orig, words=args.words, workers=args.workers))


def write_miniature(corpus: Corpus, orig: Path) -> None:
    """Write a small invented file for each file of a corpus, in its format; translations reverse the order of words."""
    generator = random.Random(1)
    for part, texts in corpus.parts().items():
        for source, target in texts:
            rows = [
                generator.choices(("one", "two", "three", "four", "twenty-five", "."), k=generator.randint(2, 9))
                for _ in range(300 if part == "train" else 6)
            ]
            sides = [(file.path, [" ".join(row[::step]) for row in rows]) for file, step in ((source, 1), (target, -1))]
            for path, group in groupby(zip(corpus.languages, sides, strict=True), key=lambda side: side[1][0]):
                content = in_format(Path(path).name.removesuffix(".gz"), {name: lines for name, (_, lines) in group})
                output = orig / path
                with replacing(output) as unfinished:
                    unfinished.write_bytes(gzip.compress(content, mtime=0) if path.endswith(".gz") else content)


def in_format(name: str, sides: dict[str, list[str]]) -> bytes:
    """Return the content of a file, in the format that the file name implies; see `parallel_text.read_text`."""
    if name.endswith(".tmx"):
        units = (
            "<tu>" + "".join(f'<tuv xml:lang="{language}"><seg>{line}</seg></tuv>' for language, line in unit) + "</tu>"
            for unit in zip(*([(language, line) for line in lines] for language, lines in sides.items()), strict=True)
        )
        return f"<tmx><body>{''.join(units)}</body></tmx>".encode()
    (lines,) = sides.values()
    if name.endswith((".sgm", ".xml")):
        lines = [f'<seg id="{number}"> {line} </seg>' for number, line in enumerate(lines, start=1)]
    elif name.startswith("train.tags."):
        lines = ["<url>of a talk</url>", "<title>one two</title>", *lines]
    return "".join(line + "\n" for line in lines).encode()


if __name__ == "__main__":
    main()
