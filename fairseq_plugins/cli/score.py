"""Print BLEU, chrF or ROUGE of translations.

If OUT is own-data's folder, score prints own-data's BLEU and chrF on held-out text again.  For other translations give
--generated and --reference.  BLEU is computed by sacreBLEU on detokenised text; --tokenised adds BLEU on tokens, as in
many papers (Moses' multi-bleu).  ROUGE is computed by rouge-score with stemming, in per cent; with several references,
the best score counts.
"""

from __future__ import annotations

import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from fairseq_plugins.cli.arguments import positive
from fairseq_plugins.cli.generated import Hypothesis, lines_of, read_generated
from fairseq_plugins.cli.own_data.folder import HeldOut, find_model, generated, is_complete, read_held_out
from fairseq_plugins.common.text import (
    can_score,
    missing_tokenizer,
    refuse_missing_tokenizer,
    rouge_scorer,
    tokenizer_for,
)

OF_OUT = {"command", "run", "output", "arch"}  # options that score accepts together with OUT
ROUGE = ("rouge1", "rouge2", "rougeL")
TOKENIZERS = ("13a", "intl", "zh", "char", "ja-mecab", "ko-mecab", "none")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "output",
        nargs="?",
        type=Path,
        metavar="OUT",
        help="own-data's folder: print the scores of its model again",
    )
    parser.add_argument("--arch", help="with OUT: the architecture, if several models were trained there")
    parser.add_argument(
        "--generated",
        nargs="+",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="output of fairseq-generate, as one file or one per shard; repeat the option to score several runs and "
        "print their mean",
    )
    parser.add_argument(
        "--reference",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="references, one per line; ROUGE accepts several files",
    )
    parser.add_argument("--tokenised", type=Path, metavar="FILE", help="tokenised reference, for BLEU on tokens")
    parser.add_argument(
        "--detokenise",
        metavar="XX",
        help="before scoring, detokenise the translations with Moses' rules for language XX, for example after "
        "--replace-unk",
    )
    parser.add_argument("--lowercase", action="store_true", help="ignore case in BLEU (sacreBLEU's signature: case:lc)")
    parser.add_argument(
        "--tokenize",
        choices=TOKENIZERS,
        help="sacreBLEU's tokenizer; use zh or char for text without spaces (default: 13a; for OUT, the tokenizer of "
        "its language)",
    )
    parser.add_argument("--rouge", action="store_true", help="print recall and F1 of ROUGE-1, ROUGE-2 and ROUGE-L")
    parser.add_argument(
        "--bytes", type=positive, metavar="N", help="with --rouge: score the first N bytes (75 for DUC-2004)"
    )


def run(args: Namespace) -> None:
    """Print the scores."""
    if args.output is not None:
        others = [name for name, value in vars(args).items() if name not in OF_OUT and value]
        if others:
            raise ValueError(f"--{others[0]}: not allowed with OUT, which has its own text; remove the option")
        print(score_folder(args.output, args.arch).describe())
        return
    if args.arch is not None or not args.generated or not args.reference:
        raise ValueError("nothing to score: give OUT of own-data, or --generated FILE and --reference FILE")
    if not args.rouge and (len(args.reference) > 1 or args.bytes is not None):
        raise ValueError("--bytes, or several files after --reference: only allowed with --rouge; add --rouge")
    if args.rouge and (args.lowercase or args.tokenize or args.tokenised is not None):
        raise ValueError(
            "--rouge ignores case and has its own tokenizer: remove --lowercase, --tokenize and --tokenised"
        )
    refuse_missing_tokenizer(args.tokenize or "13a")
    found: dict[str, list[float]] = {}
    for paths in args.generated:
        sentences = read_generated(paths)
        references = [lines_of(path, sentences) for path in args.reference]
        tokens = None if args.tokenised is None else lines_of(args.tokenised, sentences)
        best = [sentence.hypotheses[0] for sentence in sentences]
        if args.detokenise:
            from sacremoses import MosesDetokenizer  # noqa: PLC0415  (takes half a second to import)

            moses = MosesDetokenizer(args.detokenise)
            best = [replace(hypothesis, text=moses.detokenize(hypothesis.words.split())) for hypothesis in best]
        if args.rouge:
            scores = rouge([hypothesis.text for hypothesis in best], references, args.bytes)
        else:
            scores = bleu(best, references[0], tokens, lowercase=args.lowercase, tokenize=args.tokenize or "13a")
        for name, score in scores.items():
            found.setdefault(name, []).append(score)
    for name, values in found.items():
        mean = f"   mean {statistics.mean(values):.2f}" if len(values) > 1 else ""
        print(f"{name}: {' '.join(f'{value:.2f}' for value in values)}{mean}")


@dataclass(frozen=True)
class Scores:
    """BLEU and chrF of translations of a held-out part, with sacreBLEU's signatures."""

    held_out: HeldOut
    bleu: float
    bleu_signature: str
    chrf: float
    chrf_signature: str

    def describe(self) -> str:
        """Return the scored part, the scores, sacreBLEU's signature and, if needed, advice on sacreBLEU's tokenizer."""
        advice = missing_tokenizer(self.held_out.language)
        numbers = f"BLEU {self.bleu:.1f}, chrF {self.chrf:.1f} (sacreBLEU ({self.bleu_signature}))"
        return "\n".join([self.held_out.describe(), numbers, *([advice] if advice else [])])


def score_folder(output: Path, arch: str | None) -> Scores:
    """Score the translations of a model in the folder that ``own-data`` wrote."""
    folder, model = find_model(output, arch)
    part = folder.scored_part
    if not is_complete(generated(model, part), model / "checkpoint_best.pt"):
        raise ValueError(f"{generated(model, part)} is missing, outdated or truncated: run own-data again")
    return score_translations(read_held_out(folder, model, part))


def score_translations(held_out: HeldOut) -> Scores:
    """Score the best translation of each line of a held-out part."""
    bleu, chrf = BLEU(tokenize=tokenizer_for(held_out.language)), CHRF()
    texts = held_out.translations, [held_out.references]
    scores = bleu.corpus_score(*texts).score, chrf.corpus_score(*texts).score
    return Scores(held_out, scores[0], str(bleu.get_signature()), scores[1], str(chrf.get_signature()))


def bleu(
    best: Sequence[Hypothesis],
    reference: list[str],
    tokens: list[str] | None = None,
    lowercase: bool = False,
    tokenize: str = "13a",
) -> dict[str, float]:
    """Return BLEU scores by name; the name of sacreBLEU's score contains its signature."""
    metric = BLEU(lowercase=lowercase, tokenize=tokenize)
    detokenised = metric.corpus_score([hypothesis.text for hypothesis in best], [reference]).score
    scores = {f"sacreBLEU ({metric.get_signature()})": detokenised}
    if tokens is not None:
        plain = BLEU(lowercase=lowercase, tokenize="none", force=True)
        scores["tokenised BLEU"] = plain.corpus_score([hypothesis.words for hypothesis in best], [tokens]).score
    return scores


def rouge(texts: Sequence[str], references: Sequence[Sequence[str]], limit: int | None) -> dict[str, float]:
    """Return mean ROUGE scores of the sentences, in per cent."""
    if not can_score([word for each in references for line in each for word in line.split()]):
        raise ValueError(
            "--rouge: ROUGE compares only the letters a to z and digits, and the references have few of them; use BLEU"
        )
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
