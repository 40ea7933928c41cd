"""What a model of ``own-data`` translates: lines that it has not been trained on, and the user's."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TextIO

from sacrebleu.metrics.chrf import CHRF

from fairseq_plugins.cli import score
from fairseq_plugins.cli.fairseq_command import ALL_SENTENCES, NO_LONG_ONES, fairseq, fairseq_lines
from fairseq_plugins.cli.generated import read_generated
from fairseq_plugins.cli.own_data.parallel_text import read_text
from fairseq_plugins.cli.prepare.corpus import Corpus

SAMPLES = 3


def score_held_out(corpus: Corpus, out: Path, model: Path, options: list[object]) -> None:
    """Translate the test part, where there is none the validation part, and print scores and the first translations.

    Args:
        out: where the corpus has been prepared.
        model: folder for what fairseq-generate writes.
        options: its data, checkpoint and search.

    Raises:
        ValueError: it fails.
    """
    part, name = ("test", "test") if corpus.tests else ("valid", "validation")
    options = [*options, "--gen-subset", part, "--remove-bpe", "--max-tokens", 4000, "--results-path", model]
    fairseq("generate", *options, *ALL_SENTENCES, *NO_LONG_ONES)
    sentences = read_generated([model / f"generate-{part}.txt"])
    sources = untokenised(out / "tmp" / f"{part}.{corpus.source}")
    # Of the validation part, which may be a piece of the training part, only the tokens have been kept.
    tokens = out / "tmp" / f"{part}.{corpus.target}"
    targets = read_text(out / "test.reference", "") if corpus.tests else untokenised(tokens)
    pairs = list(zip(sources, targets, strict=True))
    source, target = map(list, zip(*(pairs[sentence.number] for sentence in sentences), strict=True))
    best = [sentence.hypotheses[0] for sentence in sentences]
    if left_out := len(pairs) - len(best):
        print(f"\n{left_out} lines of the {name} part are too long for the model and left out.", file=sys.stderr)
    print(f"\n{len(best)} lines of the {name} part, on which it was not trained:", file=sys.stderr)
    tokenize = "zh" if corpus.target.startswith("zh") else "13a"
    ((bleu, value),) = score.bleu(best, target, tokenize=tokenize).items()
    chrf = CHRF().corpus_score([hypothesis.text for hypothesis in best], [target]).score
    print(f"BLEU {value:.1f}, chrF {chrf:.1f} ({bleu})", file=sys.stderr)
    for line, reference, hypothesis in list(zip(source, target, best, strict=True))[:SAMPLES]:
        print(f"\n  source       {line}\n  reference    {reference}\n  translation  {hypothesis.text}", file=sys.stderr)


def untokenised(path: Path) -> Iterator[str]:
    """The lines of a file of Moses' tokens, as text."""
    from sacremoses import MosesDetokenizer  # noqa: PLC0415  (half a second)

    detokenise = MosesDetokenizer(path.suffix[1:]).detokenize
    return (str(detokenise(line.split())) for line in read_text(path, ""))


def translate(text: str, options: list[object]) -> None:
    """``fairseq-interactive``, of whose output only the translations are printed, and what it warns of."""
    if is_typed(text, sys.stdin):
        print("Type a sentence and press return, as often as you like; Ctrl-D ends it.", file=sys.stderr)
    options = [*options, *batches(text, sys.stdin), f"--input={text}"]
    with closing(fairseq_lines("interactive", *options, stdin=None)) as lines:
        for line in lines:
            if match := re.fullmatch(r"([A-Z])-\d+\t(.*)\n", line):
                if match[1] == "S":
                    blank = not match[2]  # of which models make something up
                elif match[1] == "D":
                    print("" if blank else match[2].partition("\t")[2], flush=True)
            elif "WARNING" in line:
                print(line, end="", file=sys.stderr)


def batches(text: str, stdin: TextIO) -> list[object]:
    """What is typed is translated at once, and a file by many sentences."""
    return ["--buffer-size", 1] if is_typed(text, stdin) else ["--buffer-size", 1000, "--max-tokens", 4000]


def is_typed(text: str, stdin: TextIO) -> bool:
    """Whether somebody waits for each translation."""
    return text == "-" and stdin.isatty()
