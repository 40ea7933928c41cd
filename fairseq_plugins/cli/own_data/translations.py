"""What a model of ``own-data`` translates: lines that it has not been trained on, and the user's."""

from __future__ import annotations

import re
import sys
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import TextIO

from fairseq_plugins.cli.fairseq_command import fairseq_lines
from fairseq_plugins.cli.own_data.folder import Folder
from fairseq_plugins.cli.own_data.held_out import generate, read_held_out, scored_part
from fairseq_plugins.cli.score import Scores, score_translations

SAMPLES = 3


def score_held_out(folder: Folder, model: Path, options: list[object]) -> Scores:
    """Translate the test part, or else the validation part, and print scores and the first translations.

    Args:
        folder: prepared text.
        model: folder for what fairseq-generate writes.
        options: its data, checkpoint and search.

    Returns:
        the scores.

    Raises:
        ValueError: it fails.
    """
    part = scored_part(folder)
    generate(model, part, options)
    held_out = read_held_out(folder, model, part)
    scores = score_translations(held_out)
    print(f"\n{scores.describe()}", file=sys.stderr)
    lines = zip(held_out.sources, held_out.references, held_out.translations, strict=True)
    for source, reference, translation in islice(lines, SAMPLES):
        print(f"\n  source       {source}\n  reference    {reference}\n  translation  {translation}", file=sys.stderr)
    return scores


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
