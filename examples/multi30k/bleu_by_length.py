#!/usr/bin/env python3
"""Print BLEU of the test part by source length (Gehring et al. 2016, appendix B).

``bleu_by_length.py PREPARED HYPOTHESES`` sorts the test part by the number of source words and splits it into groups of
equal size.  For each group, the script prints the shortest and longest source length, and BLEU on detokenised text.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fairseq.data.data_utils import infer_language_pair
from sacrebleu import corpus_bleu

from fairseq_plugins.cli.arguments import positive
from fairseq_plugins.cli.parallel_text import read_text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prepared", type=Path, help="output folder of prepare.py")
    parser.add_argument("hypotheses", type=Path, help="translations in the order of the test part")
    parser.add_argument("--groups", type=positive, default=4, help="number of groups (default: %(default)s)")
    args = parser.parse_args()

    try:
        source_lang, _ = infer_language_pair(args.prepared / "data-bin")
        paths = args.prepared / "tmp" / f"test.{source_lang}", args.prepared / "test.reference", args.hypotheses
        source, reference, hypotheses = (list(read_text(path, "")) for path in paths)
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    if not args.groups <= len(source) == len(reference) == len(hypotheses):
        counts = f"{len(source)} sources, {len(reference)} references and {len(hypotheses)} translations"
        sys.exit(f"{args.hypotheses}: {counts}; the numbers must be equal, and at least --groups {args.groups}")
    lengths = [len(text.split()) for text in source]
    order = sorted(range(len(source)), key=lengths.__getitem__)
    for group in range(args.groups):
        part = order[group * len(order) // args.groups : (group + 1) * len(order) // args.groups]
        bleu = corpus_bleu([hypotheses[i] for i in part], [[reference[i] for i in part]]).score
        print(f"{lengths[part[0]]:3d} to {lengths[part[-1]]:3d} words: {bleu:.1f} BLEU ({len(part)} sentences)")


if __name__ == "__main__":
    main()
