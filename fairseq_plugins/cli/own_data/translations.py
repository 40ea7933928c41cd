"""Translations by a model of ``own-data``: of held-out lines, which are scored, and of the user's text."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryFile
from typing import TextIO

from fairseq_plugins.cli.bar import bar
from fairseq_plugins.cli.fairseq_command import ALL_SENTENCES, NO_LONG_ONES, fairseq, fairseq_lines
from fairseq_plugins.cli.own_data import catalogues
from fairseq_plugins.cli.own_data.folder import Folder
from fairseq_plugins.cli.own_data.scores import Scored, held_out_part, score_held_out
from fairseq_plugins.cli.own_data.trained import BEST, TrainedModel

SAMPLES = 3
SPACE = "\u2581"  # as sentencepiece writes it
MANY: list[object] = ["--buffer-size", 1000, "--max-tokens", 4000]  # sentences at once


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
    """Print the translation of each line of a text; of a gettext catalogue all of it, with empty entries filled."""
    if text.lower().endswith(catalogues.SUFFIX):
        fill_catalogue(Path(text), options)
        return
    if is_typed(text, sys.stdin):
        print("Type a sentence and press return, as often as you like; Ctrl-D ends it.", file=sys.stderr)
    for translation in translations([*options, *batches(text, sys.stdin), f"--input={text}"]):
        print(translation, flush=True)


def fill_catalogue(path: Path, options: list[object]) -> None:
    """Print a catalogue whose empty entries are translated, and tell which placeholders were lost.

    Raises:
        ValueError: the file is not a gettext catalogue.
    """
    catalogue = catalogues.load(path)
    gaps = catalogues.gaps(catalogue)
    places: dict[str, int] = {}  # where each line stands in the catalogue
    for gap in gaps:
        for line in gap.lines():
            places.setdefault(line, gap.line)
    translated: dict[str, str] = {}
    if places:
        with TemporaryFile("w+", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{line}\n" for line in places)
            file.seek(0)
            found = translations([*options, *MANY, "--input=-"], file.fileno(), list(places.values()))
            told = bar(found, desc=f"translate {len(places)} lines", total=len(places), unit=" lines")
            translated = dict(zip(places, told, strict=True))
    for gap in gaps:
        gap.fill(translated)
    sys.stdout.buffer.write(catalogues.in_utf8(catalogue))
    print(f"\n{catalogues.report(path, gaps)}", file=sys.stderr)


def translations(options: list[object], stdin: int | None = None, places: Sequence[int] = ()) -> Iterator[str]:
    """Run ``fairseq-interactive``, and give each translation; what it warns of is printed.

    Args:
        options: its data, checkpoint, search and input.
        stdin: its standard input; None for that of this process.
        places: line numbers to name in warnings, if they are not those of its input.

    Raises:
        ValueError: it fails.
    """
    with closing(fairseq_lines("interactive", *options, stdin=stdin)) as lines:
        for line in lines:
            if match := re.fullmatch(r"([A-Z])-\d+\t(.*)\n", line):
                if match[1] == "S":
                    blank = not match[2].strip(f" {SPACE}")  # models make something up for it
                elif match[1] == "D":
                    yield "" if blank else match[2].partition("\t")[2]
            elif "WARNING" in line:
                if places:
                    line = re.sub(r"\bline (\d+)", lambda found: f"line {places[int(found[1]) - 1]}", line)
                print(line, end="", file=sys.stderr)


def batches(text: str, stdin: TextIO) -> list[object]:
    """What is typed is translated at once, and a file by many sentences."""
    return ["--buffer-size", 1] if is_typed(text, stdin) else MANY


def is_typed(text: str, stdin: TextIO) -> bool:
    """Whether somebody waits for each translation."""
    return text == "-" and stdin.isatty()
