#!/usr/bin/env python3
"""Tokenise Multi30k, learn a joint BPE, and binarise the subwords for fairseq.

``prepare.py DATA OUT`` reads ``{train,val,test_2016_flickr}.{en,de}`` from DATA (plain or gzipped), and writes the
tokens (``tmp/``), the BPE codes (``code``), the subwords (``train.en``, ...), fairseq's binary data (``data-bin/``) and
the untokenised reference of the test part (``test.reference``) to OUT.  Steps whose result exists are skipped; a folder
that was made from other text is refused.  ``--join N`` first concatenates captions to lines of at least N words, and
writes them to ``joined-N/``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fairseq_plugins.cli.parallel_text import read_text, writing
from fairseq_plugins.common.files import work_in

sys.path.append(str(Path(__file__).resolve().parents[1] / "prepare"))  # folder of corpus.py and downloads.py
from corpus import Corpus, prepare
from downloads import File, text

LANGUAGES = ("en", "de")
PARTS = ("train", "val", "test_2016_flickr")
TERMS = "The README beside this script says where to get Multi30k."


def join(data: Path, joined: Path, words: int) -> None:
    """Concatenate captions until the English line has at least ``words`` words."""
    for name in PARTS:
        # The English file is renamed to its final name last: if the English file exists, the German file exists, too.
        if (joined / f"{name}.en").exists():
            continue
        english, german = (list(read_text(File(f"{name}.{language}").place(data), language)) for language in LANGUAGES)
        if len(english) != len(german):
            raise ValueError(f"{data}: {name} has {len(english)} English and {len(german)} German lines; align them")
        with writing(joined / f"{name}.en") as source, writing(joined / f"{name}.de") as target:
            first = 0
            for end in range(1, len(english) + 1):
                line = " ".join(english[first:end])
                if len(line.split()) >= words:
                    source.write(f"{line}\n")
                    target.write(f"{' '.join(german[first:end])}\n")
                    first = end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with the original text")
    parser.add_argument("out", type=Path, help="folder for all results")
    parser.add_argument(
        "--merges", type=int, default=6000, help="number of merges of the joint BPE (default: %(default)s)"
    )
    parser.add_argument("--source-lang", default="en", choices=LANGUAGES, help="source language (default: %(default)s)")
    parser.add_argument("--join", type=int, metavar="N", help="concatenate captions to lines of at least N words")
    args = parser.parse_args()
    languages = LANGUAGES if args.source_lang == "en" else LANGUAGES[::-1]
    data, names = args.data, [f"{name}.{{}}" for name in PARTS]
    try:
        with work_in(args.out):
            if args.join is not None:
                data, names = args.out, [f"joined-{args.join}/{name}.{{}}" for name in PARTS]
                join(args.data, data / f"joined-{args.join}", args.join)
            train, valid, test = (text(name, languages) for name in names)
            corpus = Corpus(*languages, train, (test,), valid, tokenise={}, merges=args.merges, terms=TERMS)
            print(f"{prepare(corpus, args.out, data, workers=2)}: {' -> '.join(languages)}")
    except (ValueError, OSError) as error:
        sys.exit(f"prepare.py: error: {error}")


if __name__ == "__main__":
    main()
