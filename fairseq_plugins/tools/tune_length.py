"""``fairseq-plugins tune-length``: the length penalty with the best BLEU, from n-best lists of a development set.

The hypotheses that fairseq-generate has found are compared anew by log p(y|x) / |y|^A for each A; nothing is decoded.
(A search with ``--lenpen A`` may find others, so decode once more with the best.)
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from sacrebleu.metrics.bleu import BLEU

from fairseq_plugins.tools.generated import LARGEST, Sentence, add_generated, read_generated, read_text

__all__ = ["add_arguments", "run"]


def add_arguments(parser: ArgumentParser) -> None:
    """The command's arguments."""
    add_generated(parser, "fairseq-generate --nbest K")
    parser.add_argument(
        "--reference",
        type=Path,
        metavar="FILE",
        help="raw reference translations, one per line (default: those that fairseq-generate has printed)",
    )
    parser.add_argument(
        "--alphas",
        nargs="+",
        type=float,
        metavar="A",
        default=[tenths / 10 for tenths in range(21)],
        help="exponents to try (default: 0 to 2 by 0.1)",
    )


def run(args: Namespace) -> None:
    """Print BLEU, and the length of the translations relative to the references', for each exponent.

    Of exponents with equally good translations the one nearest to fairseq's default, 1, is recommended.

    Raises:
        ValueError: the lists or references cannot be read, do not fit together, or leave no choice.
    """
    if not all(abs(alpha) <= LARGEST for alpha in args.alphas):
        raise ValueError(f"--alphas: expected numbers between -{LARGEST} and {LARGEST}")
    sentences = read_generated(args.generated)
    if all(len(sentence.hypotheses) == 1 for sentence in sentences):
        raise ValueError(
            "there is one hypothesis per sentence, which leaves no choice: fairseq-generate with --nbest K"
        )
    if args.reference is None:
        references, tokenizer = printed_references(sentences)
    else:
        references, tokenizer = read_text(args.reference, sentences), "13a"
    metric = BLEU(tokenize=tokenizer, references=[references], force=True)
    bleu = {}
    print("alpha    BLEU  length")
    for alpha in args.alphas:
        score = metric.corpus_score(best_texts(sentences, alpha), None)
        bleu[alpha] = score.score
        print(f"{alpha:5g}  {score.score:6.2f}  {score.ratio:6.3f}")
    best = min(bleu, key=lambda alpha: (-bleu[alpha], abs(alpha - 1)))
    print(f"best of {len(sentences)} sentences: --lenpen {best:g}")


def best_texts(sentences: Sequence[Sentence], alpha: float) -> list[str]:
    """The best hypothesis of each sentence; of equally good ones that which fairseq has put first."""
    return [max(sentence.hypotheses, key=lambda hypothesis: hypothesis.score(alpha)).text for sentence in sentences]


def printed_references(sentences: Sequence[Sentence]) -> tuple[list[str], str]:
    """The references in the lists, and the tokenizer for them: none, unless fairseq has detokenised the text."""
    references = [sentence.reference for sentence in sentences if sentence.reference is not None]
    if len(references) < len(sentences):
        raise ValueError(f"{len(sentences) - len(references)} sentences have no reference (T- line): give --reference")
    detokenised = any(hyp.text != hyp.words for sentence in sentences for hyp in sentence.hypotheses)
    return references, "13a" if detokenised else "none"
