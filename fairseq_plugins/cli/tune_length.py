"""Find the length penalty with the best BLEU in n-best lists of a development set.

tune-length ranks the hypotheses by (log p(y|x) + W (|y| - 1)) / |y|^A for each exponent A and word penalty W, without
decoding again.  W is in nats (Gehring et al. 2016, section 4.4; --word-penalty of translation_fast).  If own-data's
folder OUT is given, tune-length first translates the validation part to OUT/ARCH/nbest, unless a current translation
exists there.  If files with n-best lists are given, they must have been generated without a word penalty, and with
--nbest equal to --beam.  After tuning, decode again with the best penalty, because the search may then find
hypotheses that the n-best lists do not contain.
"""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from sacrebleu.metrics.bleu import BLEU

from fairseq_plugins.cli.arguments import USER_DIR, add_user_dir
from fairseq_plugins.cli.generated import Sentence, lines_of, read_generated
from fairseq_plugins.cli.own_data.folder import (
    BEAM,
    BEST,
    HeldOut,
    find_model,
    generate,
    generated,
    is_complete,
    read_held_out,
)
from fairseq_plugins.cli.score import TOKENIZERS
from fairseq_plugins.common.text import refuse_missing_tokenizer, tokenizer_for

LARGEST = 10  # largest exponent; larger powers of a length would overflow


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "generated",
        nargs="+",
        type=Path,
        metavar="GENERATED",
        help="output file of fairseq-generate --nbest K, or the files of all shards, or own-data's folder",
    )
    parser.add_argument("--arch", help="with own-data's folder: the architecture, if several models were trained there")
    add_user_dir(parser, default=USER_DIR)
    parser.add_argument(
        "--reference",
        type=Path,
        metavar="FILE",
        help="untokenised references, one per line (default: the references in GENERATED)",
    )
    parser.add_argument(
        "--tokenize",
        choices=TOKENIZERS,
        help="sacreBLEU's tokenizer; use zh or char for text without spaces (default: for own-data's "
        "folder, the tokenizer of its language; for tokenised references in GENERATED, 'none'; otherwise '13a')",
    )
    parser.add_argument(
        "--alphas",
        nargs="+",
        type=float,
        metavar="A",
        default=[tenths / 10 for tenths in range(21)],
        help="exponents to try (default: 0 to 2 in steps of 0.1)",
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
    """Print BLEU and the length ratio for each pair of exponent and penalty, and recommend the best pair.

    Among equally good pairs, the exponent closest to 1, fairseq's default, is preferred, and then the penalty closest
    to 0.
    """
    if not all(abs(alpha) <= LARGEST for alpha in args.alphas):
        raise ValueError(f"--alphas {args.alphas}: must be between -{LARGEST} and {LARGEST}")
    if not all(map(math.isfinite, args.word_penalties)):
        raise ValueError(f"--word-penalties {args.word_penalties}: must be finite")
    refuse_missing_tokenizer(args.tokenize or "13a")
    is_folder = len(args.generated) == 1 and args.generated[0].is_dir()
    if is_folder:
        if args.reference is not None:
            raise ValueError("--reference: not allowed with own-data's folder, which has references; remove the option")
        held_out = validation_lists(args.generated[0], args.arch, args.user_dir)
        print(f"{held_out.describe()}\n")
        sentences = held_out.sentences
    elif args.arch is not None:
        raise ValueError("--arch: only allowed if GENERATED is own-data's folder; remove the option")
    else:
        sentences = read_generated(args.generated)
    if all(len(sentence.hypotheses) == 1 for sentence in sentences):
        raise ValueError("GENERATED has one hypothesis per sentence: run fairseq-generate with --nbest K")
    if is_folder:
        references, tokenizer = held_out.references, args.tokenize or tokenizer_for(held_out.language)
    elif args.reference is None:
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
    print(f"best options on {len(sentences)} sentences: --lenpen {alpha:g}{word_penalty}")


def validation_lists(output: Path, arch: str | None, user_dir: Path) -> HeldOut:
    """Return n-best lists of the validation part in own-data's folder; generate them if they are missing."""
    folder, model = find_model(output, arch)
    lists = model / "nbest"
    if not is_complete(generated(lists, "valid"), model / BEST):
        generate(lists, "valid", [*folder.decoding_options(model / BEST, user_dir), "--nbest", BEAM])
    return read_held_out(folder, lists, "valid")


def best_texts(sentences: Sequence[Sentence], alpha: float, word_penalty: float = 0.0) -> list[str]:
    """Return the best hypothesis of each sentence; if scores are equal, the first hypothesis in fairseq's order."""
    return [max(sentence.hypotheses, key=lambda each: each.score(alpha, word_penalty)).text for sentence in sentences]


def printed_references(sentences: Sequence[Sentence], tokenizer: str | None) -> tuple[list[str], str]:
    """Return the references in the n-best lists, and sacreBLEU's tokenizer.

    The default tokenizer is ``13a`` if hypotheses are detokenised, and otherwise ``none``.
    """
    references = [sentence.reference for sentence in sentences if sentence.reference is not None]
    if len(references) < len(sentences):
        missing = f"{len(sentences) - len(references)} of {len(sentences)}"
        raise ValueError(f"GENERATED: no T- line for {missing} sentences; give --reference")
    detokenised = any(hyp.text != hyp.words for sentence in sentences for hyp in sentence.hypotheses)
    return references, tokenizer or ("13a" if detokenised else "none")
