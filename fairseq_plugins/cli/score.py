"""``fairseq-plugins score``: BLEU or ROUGE of what fairseq-generate wrote, or of its shards; or of own-data's model.

BLEU is sacreBLEU's, of the detokenised text, with its signature; with ``--tokenised`` also that of the tokens, which
the papers report (the figure of Moses' multi-bleu).  ROUGE is rouge-score's, with stemming, in per cent; of several
references the best counts.  Several runs, each a group of files after its own ``--generated``, also get their mean.
"""

from __future__ import annotations

import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sacrebleu.metrics.bleu import BLEU

from fairseq_plugins.cli.arguments import positive, refuse_unreadable
from fairseq_plugins.cli.generated import Hypothesis, lines_of, read_generated
from fairseq_plugins.cli.own_data.scores import TOKENIZERS, held_out_part, score_held_out
from fairseq_plugins.cli.own_data.trained import find_trained
from fairseq_plugins.common.rouge import rouge_scorer, sees

ROUGE = ("rouge1", "rouge2", "rougeL")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        metavar="OUT",
        help="own-data's folder alone: scores of the held-out lines that its model has translated",
    )
    parser.add_argument("--arch", help="with OUT: which model, if several are trained there")
    parser.add_argument(
        "--generated",
        nargs="+",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="generate-*.txt of one run; once more for each other run",
    )
    parser.add_argument(
        "--reference", nargs="+", type=Path, default=[], metavar="FILE", help="a line each; several for ROUGE"
    )
    parser.add_argument("--tokenised", type=Path, metavar="FILE", help="the reference's tokens")
    parser.add_argument(
        "--detokenise", metavar="XX", help="language of translations that are tokens, as --replace-unk leaves them"
    )
    parser.add_argument(
        "--lowercase", action="store_true", help="BLEU without case, of both texts (sacreBLEU's signature: case:lc)"
    )
    parser.add_argument(
        "--tokenize",
        choices=TOKENIZERS,
        default="13a",
        help="BLEU's tokens, as of sacreBLEU; text without spaces wants zh or char (default: %(default)s)",
    )
    parser.add_argument("--rouge", action="store_true", help="ROUGE-1, 2 and L: recall and F1")
    parser.add_argument("--bytes", type=positive, metavar="N", help="with --rouge: of the first N bytes (DUC-2004: 75)")


def run(args: Namespace) -> None:
    """Print the scores.

    Raises:
        ValueError: texts cannot be read or do not fit together, or ROUGE cannot be had of them.
    """
    if args.folder is not None:
        if args.generated or args.reference:
            raise ValueError(f"{args.folder}: leave out --generated and --reference, which the folder has")
        trained = find_trained(args.folder, args.arch)
        print(score_held_out(trained.folder, trained.model / f"generate-{held_out_part(trained.folder)}.txt"))
        return
    if not args.generated or not args.reference:
        raise ValueError("expected own-data's folder OUT, or --generated FILE --reference FILE")
    if not args.rouge and (len(args.reference) > 1 or args.bytes is not None):
        raise ValueError("several references and --bytes need --rouge")
    if args.rouge and (args.lowercase or args.tokenised is not None):
        raise ValueError("--rouge ignores case and makes its own tokens: leave out --lowercase and --tokenised")
    refuse_unreadable(*(path for paths in args.generated for path in paths), *args.reference, args.tokenised)
    found: dict[str, list[float]] = {}
    for paths in args.generated:
        sentences = read_generated(paths)
        references = [lines_of(path, sentences) for path in args.reference]
        tokens = None if args.tokenised is None else lines_of(args.tokenised, sentences)
        best = [sentence.hypotheses[0] for sentence in sentences]
        if args.detokenise:
            from sacremoses import MosesDetokenizer  # noqa: PLC0415  (half a second)

            moses = MosesDetokenizer(args.detokenise)
            best = [replace(hypothesis, text=moses.detokenize(hypothesis.words.split())) for hypothesis in best]
        if args.rouge:
            scores = rouge([hypothesis.text for hypothesis in best], references, args.bytes)
        else:
            scores = bleu(best, references[0], tokens, lowercase=args.lowercase, tokenize=args.tokenize)
        for name, score in scores.items():
            found.setdefault(name, []).append(score)
    for name, values in found.items():
        mean = f"   mean {statistics.mean(values):.2f}" if len(values) > 1 else ""
        print(f"{name}: {' '.join(f'{value:.2f}' for value in values)}{mean}")


def bleu(
    best: Sequence[Hypothesis],
    reference: list[str],
    tokens: list[str] | None = None,
    lowercase: bool = False,
    tokenize: str = "13a",
) -> dict[str, float]:
    """By name, which for sacreBLEU has its signature."""
    metric = BLEU(lowercase=lowercase, tokenize=tokenize)
    detokenised = metric.corpus_score([hypothesis.text for hypothesis in best], [reference]).score
    scores = {f"sacreBLEU ({metric.get_signature()})": detokenised}
    if tokens is not None:
        plain = BLEU(lowercase=lowercase, tokenize="none", force=True)
        scores["tokenised BLEU"] = plain.corpus_score([hypothesis.words for hypothesis in best], [tokens]).score
    return scores


def rouge(texts: Sequence[str], references: Sequence[Sequence[str]], limit: int | None) -> dict[str, float]:
    """Means over the sentences, in per cent.

    Raises:
        ValueError: rouge-score is not installed, or hardly sees the references.
    """
    if not sees([word for each in references for line in each for word in line.split()]):
        raise ValueError("--rouge sees only the letters a to z and digits, of which the references have hardly any")
    scorer = rouge_scorer(ROUGE)
    results = [
        scorer.score_multi(targets, text.encode()[:limit].decode(errors="ignore"))
        for text, *targets in zip(texts, *references, strict=True)
    ]
    return {
        f"{name} {part}": 100 * statistics.mean(getattr(result[name], field) for result in results)
        for name in ROUGE
        for part, field in (("recall", "recall"), ("F1", "fmeasure"))
    }
