#!/usr/bin/env python3
"""Score the demo's translations and show ten of them.

``report.py TEXT GENERATED`` compares fairseq-generate's ``generate-test.txt`` with ``test.de`` in TEXT.  With
``--check`` the script fails if the scores are lower than those of a properly trained demo model.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sacrebleu.metrics import BLEU, CHRF

from fairseq_plugins.cli.generated import lines_of, read_generated

MIN_BLEU, MIN_EXACT = 95, 90
SHOWN = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="folder with test.en and test.de")
    parser.add_argument("generated", type=Path, help="fairseq-generate's generate-test.txt")
    parser.add_argument(
        "--check", action="store_true", help=f"fail below {MIN_BLEU} BLEU or {MIN_EXACT} %% exact match"
    )
    args = parser.parse_args()

    try:
        sentences = read_generated([args.generated])
        sources, references = (lines_of(args.text / f"test.{language}", sentences) for language in ("en", "de"))
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    translations = [sentence.hypotheses[0].text for sentence in sentences]

    for source, reference, translation in list(zip(sources, references, translations, strict=True))[:SHOWN]:
        print(f"  {source}\n  {translation}")
        print("  right\n" if translation == reference else f"  wrong, expected: {reference}\n")
    bleu = BLEU().corpus_score(translations, [references]).score
    chrf = CHRF().corpus_score(translations, [references]).score
    right = sum(map(str.__eq__, translations, references))
    exact = 100 * right / len(references)
    print(f"sacreBLEU {bleu:.1f}   chrF {chrf:.1f}   exact match {exact:.1f} % ({right} of {len(references)})")
    if args.check and (bleu < MIN_BLEU or exact < MIN_EXACT):
        sys.exit(f"--check: expected at least {MIN_BLEU} BLEU and {MIN_EXACT} % exact match; check the training's log")


if __name__ == "__main__":
    main()
