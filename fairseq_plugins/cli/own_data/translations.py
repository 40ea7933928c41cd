"""What a model of ``own-data`` translates: lines that it has not been trained on, and the user's."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryFile
from typing import TextIO

from sacrebleu.metrics.chrf import CHRF

from fairseq_plugins.cli import score
from fairseq_plugins.cli.bar import bar
from fairseq_plugins.cli.fairseq_command import ALL_SENTENCES, NO_LONG_ONES, fairseq, fairseq_lines
from fairseq_plugins.cli.generated import read_generated
from fairseq_plugins.cli.own_data import catalogues
from fairseq_plugins.cli.own_data.folder import Folder
from fairseq_plugins.cli.own_data.parallel_text import read_text

SAMPLES = 3
MANY: list[object] = ["--buffer-size", 1000, "--max-tokens", 4000]  # sentences at once


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
                    blank = not match[2]  # of which models make something up
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
