"""``fairseq-plugins tune-length``: the length penalty with the best BLEU, from n-best lists of a development set.

The hypotheses that fairseq-generate has found are compared anew by (log p(y|x) + W (|y| - 1)) / |y|^A for each A and
W; nothing is decoded.  W is the word penalty of Gehring et al. 2016 (section 4.4), ``--word-penalty`` of
`translation_fast`: for each word but the end, in nats.  The lists should be made without one, and with ``--nbest`` as
large as ``--beam``.  A search with the best may find others, so decode once more.
"""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from sacrebleu.metrics.bleu import BLEU

from fairseq_plugins.cli.arguments import add_user_dir, refuse_unreadable
from fairseq_plugins.cli.generated import LARGEST, Sentence, add_generated, lines_of, read_generated
from fairseq_plugins.cli.own_data.scores import TOKENIZERS, tokenizer_for
from fairseq_plugins.cli.own_data.trained import TrainedModel, find_trained
from fairseq_plugins.cli.own_data.translations import generate
from fairseq_plugins.cli.user_dir import USER_DIR


def add_arguments(parser: ArgumentParser) -> None:
    add_generated(parser, "fairseq-generate --nbest K; or own-data's folder alone, whose validation part is translated")
    parser.add_argument("--arch", help="with own-data's folder: which model, if several are trained there")
    add_user_dir(parser, default=USER_DIR)
    parser.add_argument(
        "--reference",
        type=Path,
        metavar="FILE",
        help="raw reference translations, one per line (default: those that fairseq-generate has printed)",
    )
    parser.add_argument(
        "--tokenize",
        choices=TOKENIZERS,
        help="BLEU's tokens, as of sacreBLEU (default: 13a, or none for tokens); text without spaces wants zh or char",
    )
    parser.add_argument(
        "--alphas",
        nargs="+",
        type=float,
        metavar="A",
        default=[tenths / 10 for tenths in range(21)],
        help="exponents to try (default: 0 to 2 by 0.1)",
    )
    parser.add_argument(
        "--word-penalties",
        nargs="+",
        type=float,
        metavar="W",
        default=[0.0],
        help="word penalties to try with each exponent, in nats (default: 0)",
    )


def run(args: Namespace) -> None:
    """Print BLEU, and the length of the translations relative to the references', for each exponent and penalty.

    Of equally good translations those with the exponent nearest to fairseq's default, 1, are recommended, and of those
    the ones with the smallest penalty.

    Raises:
        ValueError: the lists or references cannot be read, do not fit together, or leave no choice.
    """
    if not all(abs(alpha) <= LARGEST for alpha in args.alphas):
        raise ValueError(f"--alphas: expected numbers between -{LARGEST} and {LARGEST}")
    if not all(map(math.isfinite, args.word_penalties)):
        raise ValueError("--word-penalties: expected numbers")
    if len(args.generated) == 1 and args.generated[0].is_dir():
        trained = find_trained(args.generated[0], args.arch)
        args.generated = [lists_of(trained, args.user_dir)]
        args.tokenize = args.tokenize or tokenizer_for(trained.folder.languages[1])
    refuse_unreadable(*args.generated, args.reference)
    sentences = read_generated(args.generated)
    if all(len(sentence.hypotheses) == 1 for sentence in sentences):
        raise ValueError(
            "there is one hypothesis per sentence, which leaves no choice: fairseq-generate with --nbest K"
        )
    if args.reference is None:
        references, tokenizer = printed_references(sentences, args.tokenize)
    else:
        references, tokenizer = lines_of(args.reference, sentences), args.tokenize or "13a"
    metric = BLEU(tokenize=tokenizer, references=[references], force=True)
    bleu = {}
    print("alpha  penalty    BLEU  length")
    for alpha, penalty in product(args.alphas, args.word_penalties):
        score = metric.corpus_score(best_texts(sentences, alpha, penalty), None)
        bleu[alpha, penalty] = score.score
        print(f"{alpha:5g}  {penalty:7g}  {score.score:6.2f}  {score.ratio:6.3f}")
    alpha, penalty = min(bleu, key=lambda tried: (-bleu[tried], abs(tried[0] - 1), abs(tried[1])))
    word_penalty = f" --task translation_fast --word-penalty={penalty:g}" if penalty else ""
    print(f"best of {len(sentences)} sentences: --lenpen {alpha:g}{word_penalty}")


def lists_of(trained: TrainedModel, user_dir: Path) -> Path:
    """Return the n-best lists of the validation part, which are made once for each checkpoint."""
    lists = trained.model / "nbest" / "generate-valid.txt"
    if not lists.exists() or lists.stat().st_mtime < trained.checkpoint.stat().st_mtime:
        search = ["--user-dir", user_dir, "--task", "translation_fast", "--beam", 5, "--nbest", 5]
        generate(trained.folder, "valid", trained.checkpoint, lists.parent, search)
    return lists


def best_texts(sentences: Sequence[Sentence], alpha: float, word_penalty: float = 0.0) -> list[str]:
    """The best hypothesis of each sentence; of equally good ones that which fairseq has put first."""
    return [max(sentence.hypotheses, key=lambda each: each.score(alpha, word_penalty)).text for sentence in sentences]


def printed_references(sentences: Sequence[Sentence], tokenizer: str | None) -> tuple[list[str], str]:
    """The references in the lists, and the tokenizer: if none is asked for, none, unless fairseq has detokenised."""
    references = [sentence.reference for sentence in sentences if sentence.reference is not None]
    if len(references) < len(sentences):
        raise ValueError(f"{len(sentences) - len(references)} sentences have no reference (T- line): give --reference")
    detokenised = any(hyp.text != hyp.words for sentence in sentences for hyp in sentence.hypotheses)
    return references, tokenizer or ("13a" if detokenised else "none")
