"""``fairseq-plugins tune-offset``: where to look for what an unknown word stands for, from a development set.

Some models attend to the word beside the one that they translate (Gehring et al. 2016, section 4.4).  Unknown words of
translations that fairseq-generate has made with ``--print-alignment`` are replaced anew with each offset; nothing is
decoded.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from fairseq_plugins.tools.arguments import refuse_unreadable
from fairseq_plugins.tools.generated import add_generated

__all__ = ["add_arguments", "run"]


def add_arguments(parser: ArgumentParser) -> None:
    add_generated(parser, "fairseq-generate --print-alignment, without --replace-unk")
    for side, text in (("source", "what was translated"), ("reference", "its right translations")):
        words = f"{text}, in the words of the model's text, one sentence per line"
        parser.add_argument(f"--{side}", type=Path, required=True, metavar="FILE", help=words)
    parser.add_argument(
        "--dictionary", metavar="FILE", help="what --replace-unk will be given (default: nothing, words are copied)"
    )
    parser.add_argument(
        "--offsets",
        nargs="+",
        type=int,
        metavar="N",
        default=list(range(-3, 4)),
        help="words behind the most attended one to try (default: -3 to 3)",
    )


def run(args: Namespace) -> None:
    """Print how many unknown words are replaced rightly, and BLEU, for each offset.

    Of offsets that are as good the one nearest to 0 is recommended.

    Raises:
        ValueError: the translations or texts cannot be read, do not fit together, or leave nothing to replace.
    """
    refuse_unreadable(*args.generated, args.source, args.reference, args.dictionary and Path(args.dictionary))
    from fairseq_plugins.tools.offsets import compare  # noqa: PLC0415  (with torch and fairseq: seconds)

    compare(args)
