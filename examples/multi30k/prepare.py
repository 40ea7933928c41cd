#!/usr/bin/env python3
"""Tokenise Multi30k, learn a joint BPE and binarise it for fairseq.

``prepare.py DATA OUT`` reads ``{train,val,test_2016_flickr}.{en,de}`` from DATA (plain or gzipped) and leaves in OUT
the tokenised text (``tmp/``), the BPE codes (``code``), the segmented text (``train.en``, ...), fairseq's binary data
(``data-bin/``) and the untouched reference of the test part (``test.reference``).  A step whose result is already there
is not repeated.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fairseq_plugins.tools.corpus import Corpus, File, Texts, prepare

LANGUAGES = ("en", "de")
TERMS = "The README beside this script says where to get Multi30k."


def texts(folder: Path, name: str, languages: tuple[str, str]) -> Texts:
    """The two files of a part, gzipped where they are."""
    files = (f"{name}.{language}" for language in languages)
    source, target = (File(f"{file}.gz" if (folder / f"{file}.gz").exists() else file) for file in files)
    return ((source, target),)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with the original text")
    parser.add_argument("out", type=Path, help="folder for everything that is made")
    parser.add_argument("--merges", type=int, default=6000, help="joint BPE merges (default: %(default)s)")
    parser.add_argument("--source-lang", default="en", choices=LANGUAGES, help="source language (default: %(default)s)")
    args = parser.parse_args()
    languages = LANGUAGES if args.source_lang == "en" else LANGUAGES[::-1]
    train, valid, test = (texts(args.data, name, languages) for name in ("train", "val", "test_2016_flickr"))
    corpus = Corpus(*languages, train, (test,), valid, tokenise={}, merges=args.merges, terms=TERMS)
    try:
        print(f"{prepare(corpus, args.out, args.data, workers=2)}: {' -> '.join(languages)}")
    except (ValueError, OSError) as error:
        sys.exit(f"prepare.py: error: {error}")


if __name__ == "__main__":
    main()
