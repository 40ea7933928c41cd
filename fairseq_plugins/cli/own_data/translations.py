"""What a model of ``own-data`` translates: lines that it has not been trained on, and the user's."""

from __future__ import annotations

import re
import sys
from contextlib import closing
from pathlib import Path
from typing import TextIO

from sacrebleu.metrics.chrf import CHRF

from fairseq_plugins.cli import score
from fairseq_plugins.cli.fairseq_command import ALL_SENTENCES, NO_LONG_ONES, fairseq, fairseq_lines
from fairseq_plugins.cli.generated import read_generated
from fairseq_plugins.cli.own_data.folder import Folder
from fairseq_plugins.cli.own_data.parallel_text import read_text

SAMPLES = 3
SPACE = "\u2581"  # as sentencepiece writes it


def score_held_out(folder: Folder, model: Path, options: list[object]) -> None:
    """Translate the test part, or else the validation part, and print scores and the first translations.

    Args:
        folder: prepared text.
        model: folder for what fairseq-generate writes.
        options: its data, checkpoint and search.

    Raises:
        ValueError: it fails.
    """
    part, name = ("test", "test") if "test" in folder.parts else ("valid", "validation")
    options = [*options, "--gen-subset", part, "--remove-bpe", "--max-tokens", 4000, "--results-path", model]
    fairseq("generate", *options, *ALL_SENTENCES, *NO_LONG_ONES)
    sentences = read_generated([model / f"generate-{part}.txt"])
    pairs = list(zip(*(read_text(path, "") for path in folder.text(part)), strict=True))
    source, target = map(list, zip(*(pairs[sentence.number] for sentence in sentences), strict=True))
    best = [sentence.hypotheses[0] for sentence in sentences]
    if left_out := len(pairs) - len(best):
        print(f"\n{left_out} lines of the {name} part are too long for the model and left out.", file=sys.stderr)
    print(f"\n{len(best)} lines of the {name} part, on which it was not trained:", file=sys.stderr)
    ((bleu, value),) = score.bleu(best, target, tokenize=score.tokenizer_for(folder.languages[1])).items()
    chrf = CHRF().corpus_score([hypothesis.text for hypothesis in best], [target]).score
    print(f"BLEU {value:.1f}, chrF {chrf:.1f} ({bleu})", file=sys.stderr)
    for line, reference, hypothesis in list(zip(source, target, best, strict=True))[:SAMPLES]:
        print(f"\n  source       {line}\n  reference    {reference}\n  translation  {hypothesis.text}", file=sys.stderr)


def translate(text: str, options: list[object]) -> None:
    """``fairseq-interactive``, of whose output only the translations are printed, and what it warns of."""
    if is_typed(text, sys.stdin):
        print("Type a sentence and press return, as often as you like; Ctrl-D ends it.", file=sys.stderr)
    options = [*options, *batches(text, sys.stdin), f"--input={text}"]
    with closing(fairseq_lines("interactive", *options, stdin=None)) as lines:
        for line in lines:
            if match := re.fullmatch(r"([A-Z])-\d+\t(.*)\n", line):
                if match[1] == "S":
                    blank = not match[2].strip(f" {SPACE}")  # models make something up for it
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
