"""Translations with a model of ``own-data``: held-out text with scores, and the user's text."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import TextIO

from fairseq_plugins.cli.bar import bar
from fairseq_plugins.cli.own_data import catalogues
from fairseq_plugins.cli.own_data.folder import BEST, Folder
from fairseq_plugins.cli.own_data.held_out import generate, read_held_out, scored_part
from fairseq_plugins.cli.own_data.trained import Base
from fairseq_plugins.cli.processes import fairseq_lines
from fairseq_plugins.cli.score import Scores, score_translations

SAMPLES = 3
MANY: list[object] = ["--buffer-size", 1000, "--max-tokens", 4000]  # batches for files


def score_held_out(folder: Folder, model: Path, options: list[object]) -> Scores:
    """Translate the test or validation part, and print scores and the first translations.

    Args:
        folder: prepared text.
        model: folder for the output of fairseq-generate.
        options: data, checkpoint and search options of fairseq-generate.

    Raises:
        ValueError: fairseq-generate fails.
    """
    scores = scores_of(folder, model, options)
    print(f"\n{scores.describe()}", file=sys.stderr)
    held_out = scores.held_out
    lines = zip(held_out.sources, held_out.references, held_out.translations, strict=True)
    for source, reference, translation in islice(lines, SAMPLES):
        print(f"\n  source       {source}\n  reference    {reference}\n  translation  {translation}", file=sys.stderr)
    return scores


def scores_of(folder: Folder, results: Path, options: list[object]) -> Scores:
    """Translate and score the held-out part of a folder."""
    part = scored_part(folder)
    generate(results, part, options)
    return score_translations(read_held_out(folder, results, part))


def compare_with_base(scores: Scores, folder: Folder, model: Path, base: Base, user_dir: Path) -> None:
    """Print scores of the base model and of the adapted model, on this text and on the text of the base model."""
    after = {"this text": scores}
    before: dict[str, Scores] = {}
    old = f"the text of {base.folder.path}"
    for name, text, checkpoint, found in (
        ("this text", folder, base.checkpoint, before),
        (old, base.folder, base.checkpoint, before),
        (old, base.folder, model / BEST, after),
    ):
        results = model / "comparison" / str(len(before) + len(after))
        found[name] = scores_of(text, results, text.decoding_options(checkpoint, user_dir))
    print("\nBLEU and chrF before and after the adaptation:", file=sys.stderr)
    for name, then in before.items():
        now = after[name]
        print(
            f"  {name} ({len(now.held_out.sentences)} lines): {then.bleu:.1f}, {then.chrf:.1f} before; "
            f"{now.bleu:.1f}, {now.chrf:.1f} after",
            file=sys.stderr,
        )


def translate(text: str, options: list[object]) -> None:
    """Print the translation of each line of a text file, or a gettext catalogue with its empty entries translated."""
    if text.lower().endswith(catalogues.SUFFIX):
        fill_catalogue(Path(text), options)
        return
    if is_typed(text, sys.stdin):
        print("Type a sentence and press Enter. Ctrl-D quits.", file=sys.stderr)
    for translation in translations([*options, *batches(text, sys.stdin), f"--input={text}"]):
        print(translation, flush=True)


def fill_catalogue(path: Path, options: list[object]) -> None:
    """Print a catalogue with its empty entries translated, and report lost placeholders on stderr.

    Raises:
        ValueError: the file is not a gettext catalogue.
    """
    catalogue = catalogues.load(path)
    gaps = catalogues.gaps(catalogue)
    places: dict[str, int] = {}  # line numbers in the catalogue
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
    """Run ``fairseq-interactive``, yield its translations and print its warnings.

    Args:
        options: data, checkpoint, search and input options.
        stdin: file descriptor for its standard input; None to inherit it.
        places: line numbers to print in warnings, if they differ from the line numbers of the input.

    Raises:
        ValueError: fairseq-interactive fails.
    """
    with closing(fairseq_lines("interactive", *options, stdin=stdin)) as lines:
        for line in lines:
            if match := re.fullmatch(r"D-\d+\t[^\t]*\t(.*)\n", line):
                yield match[1]
            elif "WARNING" in line:
                if places:
                    line = re.sub(r"\bline (\d+)", lambda found: f"line {places[int(found[1]) - 1]}", line)
                print(line, end="", file=sys.stderr)


def batches(text: str, stdin: TextIO) -> list[object]:
    """Return batch options: single lines if the user types, large batches for files."""
    return ["--buffer-size", 1] if is_typed(text, stdin) else MANY


def is_typed(text: str, stdin: TextIO) -> bool:
    """Return whether the user types the text."""
    return text == "-" and stdin.isatty()
