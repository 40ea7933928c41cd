"""Translations by a model of ``own-data``: of held-out lines, which are scored, and of the user's text."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TextIO

from fairseq_plugins.cli.fairseq_command import ALL_SENTENCES, NO_LONG_ONES, fairseq, fairseq_lines
from fairseq_plugins.cli.own_data.folder import Folder
from fairseq_plugins.cli.own_data.scores import Scored, held_out_part, score_held_out
from fairseq_plugins.cli.own_data.trained import BEST, TrainedModel

SAMPLES = 3
SPACE = "\u2581"  # as sentencepiece writes it


def generate(folder: Folder, part: str, checkpoint: Path, results: Path, options: Sequence[object]) -> Path:
    """Run fairseq-generate on a part of a folder.

    Args:
        folder: prepared text.
        part: ``valid`` or ``test``.
        checkpoint: the model, of this or another folder with the same dictionary.
        results: folder to write to.
        options: of fairseq-generate, for the search.

    Returns:
        The file that it wrote.

    Raises:
        ValueError: it fails.
    """
    source, target = folder.languages
    words = [folder.binary, "--source-lang", source, "--target-lang", target, "--path", checkpoint, *options]
    words += [*folder.fairseq_options(), "--gen-subset", part, "--max-tokens", 4000, "--results-path", results]
    if folder.tokenizer == "moses":
        words.append("--remove-bpe")
    fairseq("generate", *words, *ALL_SENTENCES, *NO_LONG_ONES)
    return results / f"generate-{part}.txt"


def print_scores(scored: Scored) -> None:
    """Print scores and the first translations."""
    print(f"\n{scored}", file=sys.stderr)
    for source, reference, hypothesis in scored.lines[:SAMPLES]:
        print(f"\n  source       {source}\n  reference    {reference}\n  translation  {hypothesis}", file=sys.stderr)


def compare_with_base(
    scored: Scored, folder: Folder, model: Path, base: TrainedModel, options: Sequence[object]
) -> None:
    """Print what a model has gained by its adaptation, and what it has lost on the text that its base was made for."""

    def translated(text: Folder, checkpoint: Path, name: str) -> Scored:
        return score_held_out(text, generate(text, held_out_part(text), checkpoint, model / name, options))

    before = translated(folder, base.checkpoint, "base")
    old_before, old_after = (
        translated(base.folder, base.checkpoint, "base-old"),
        translated(base.folder, model / BEST, "old"),
    )
    print("\nBLEU and chrF before and after the adaptation:", file=sys.stderr)
    for name, first, second in (
        ("this text", before, scored),
        (f"the text of {base.folder.path}", old_before, old_after),
    ):
        print(
            f"  {len(second.lines)} lines of {name}: "
            f"{first.bleu:.1f}, {first.chrf:.1f} before; {second.bleu:.1f}, {second.chrf:.1f} after",
            file=sys.stderr,
        )


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
