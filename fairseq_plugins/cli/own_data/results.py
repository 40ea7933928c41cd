"""Results of ``own-data``: scores, model card, and translations of the user's text.

The model card is the README.md in the folder of the checkpoints.  An exported folder contains the card
without the commands.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from datetime import date
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile

import fairseq_plugins
from fairseq_plugins.cli import catalogues
from fairseq_plugins.cli.own_data.cleaning import RULES
from fairseq_plugins.cli.own_data.folder import (
    BEST,
    FIGURES,
    FINISHED,
    PARTS,
    SETTINGS,
    Base,
    Folder,
    generate,
    is_trained,
    read_held_out,
)
from fairseq_plugins.cli.parallel_text import bar, read_text, writing
from fairseq_plugins.cli.plot_loss import LOG, records
from fairseq_plugins.cli.processes import fairseq_lines
from fairseq_plugins.cli.score import Scores, score_translations

CARD = "README.md"
COMMANDS = "## Commands"  # Exported folders contain the card up to this heading.
KINDS = {"sentencepiece": "sentencepiece BPE", "moses": "Moses' tokens with subword-nmt's BPE"}
NAMED = 20  # maximum number of text files that the card names
# Options whose values contain local paths.
PATHS = ("--user-dir", "--save-dir", "--finetune-from-model", "--eval-bleu-detok-args")
SAMPLES = 3
MANY: list[object] = ["--buffer-size", 1000, "--max-tokens", 4000]  # batches for files


def score_held_out(folder: Folder, model: Path, options: list[object]) -> Scores:
    """Translate the test or validation part with a model, and print scores and the first translations."""
    scores = scores_of(folder, model, options)
    print(f"\n{scores.describe()}", file=sys.stderr)
    held_out = scores.held_out
    lines = zip(held_out.sources, held_out.references, held_out.translations, strict=True)
    for source, reference, translation in islice(lines, SAMPLES):
        print(f"\n  source       {source}\n  reference    {reference}\n  translation  {translation}", file=sys.stderr)
    return scores


def scores_of(folder: Folder, results: Path, options: list[object]) -> Scores:
    """Translate and score the held-out part of a folder; fairseq-generate writes to the folder ``results``."""
    generate(results, folder.scored_part, options)
    return score_translations(read_held_out(folder, results, folder.scored_part))


def compare_with_base(scores: Scores, folder: Folder, model: Path, base: Base, user_dir: Path) -> None:
    """Print scores of the base model and the adapted model, on the held-out text of the adaptation and of the base."""
    pairs = ((folder, base.checkpoint), (base.folder, base.checkpoint), (base.folder, model / BEST))
    new, old, forgotten = (
        scores_of(text, model / "comparison" / str(number), text.decoding_options(checkpoint, user_dir))
        for number, (text, checkpoint) in enumerate(pairs)
    )
    print("\nBLEU and chrF before and after the adaptation:", file=sys.stderr)
    for name, then, now in (("this text", new, scores), (f"the text of {base.folder.path}", old, forgotten)):
        print(
            f"  {name} ({len(now.held_out.sentences)} lines): {then.bleu:.1f}, {then.chrf:.1f} before; "
            f"{now.bleu:.1f}, {now.chrf:.1f} after",
            file=sys.stderr,
        )


def translate(text: str, options: list[object]) -> None:
    """Print the translations of a file's lines; for a gettext catalogue, print it with its empty entries filled."""
    if text.lower().endswith(catalogues.SUFFIX):
        fill_catalogue(Path(text), options)
        return
    is_typed = text == "-" and sys.stdin.isatty()
    if is_typed:
        print("Type a sentence and press Enter. Ctrl-D quits.", file=sys.stderr)
    for translation in translations([*options, *(["--buffer-size", 1] if is_typed else MANY), f"--input={text}"]):
        print(translation, flush=True)


def fill_catalogue(path: Path, options: list[object]) -> None:
    """Print a catalogue with its empty entries translated, and report wrong placeholders on stderr."""
    catalogue = catalogues.load(path)
    gaps = catalogues.gaps(catalogue)
    places: dict[str, int] = {}  # lines to translate, and their line numbers in the catalogue
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
        stdin: file descriptor for fairseq-interactive's standard input; None to inherit the standard input.
        places: line numbers to print in warnings, if they differ from the line numbers of the input.
    """
    with closing(fairseq_lines("interactive", *options, stdin=stdin)) as lines:
        for line in lines:
            if match := re.fullmatch(r"D-\d+\t[^\t]*\t(.*)\n", line):
                yield match[1]
            elif "WARNING" in line:
                if places:
                    line = re.sub(r"\bline (\d+)", lambda found: f"line {places[int(found[1]) - 1]}", line)
                print(line, end="", file=sys.stderr)


def write_card(folder: Folder, model: Path, scores: Scores, base: Base | None, commands: Mapping[str, str]) -> None:
    """Write the model card of a trained model; ``commands`` maps purposes to shell commands."""
    source, target = folder.languages
    held_out = scores.held_out
    also = " (these lines also decided when to stop training)" if held_out.part == "valid" else ""
    day = date.fromtimestamp((model / FINISHED).stat().st_mtime)
    words = sum(1 for _ in read_text(folder.binary / f"dict.{source}.txt", ""))
    name = "" if base is None else base.folder.path.resolve().name
    adapted = [] if base is None else [f"- Adapted from: `{base.checkpoint.name}` of the folder `{name}`"]
    skipped = [f"- Skipped lines, too long for the model: {held_out.left_out}"] if held_out.left_out else []
    lines = [
        f"# {model.name}, {source} to {target}\n",
        f"`fairseq-plugins own-data`, version {fairseq_plugins.__version__}, trained this model on {day}.\n",
        "## Text\n",
        *_text(folder),
        "- Licence of the text: unknown to this program\n",
        "## Model\n",
        f"- Architecture: `{model.name}`",
        *adapted,
        *_training(model / LOG),
        f"- Subwords: {KINDS[folder.tokenizer]}; {words} entries in the shared dictionary\n",
        "## Scores\n",
        f"- Held-out lines of the {PARTS[held_out.part]} part: {len(held_out.sentences)}{also}",
        *skipped,
        f"- BLEU {scores.bleu:.1f} (sacreBLEU `{scores.bleu_signature}`)",
        f"- chrF {scores.chrf:.1f} (sacreBLEU `{scores.chrf_signature}`)",
        "- Decoding: `checkpoint_best.pt` with beam 5; references: text before preprocessing",
    ]
    lines += [f"\n{COMMANDS}", *(f"\n{what}:\n\n    {words}" for what, words in commands.items())]
    with writing(model / CARD) as file:
        file.writelines(f"{line}\n" for line in lines)


def card_of(checkpoint: Path) -> str:
    """Return a trained model's card without its commands; without model or card, return an empty string."""
    card = checkpoint.parent / CARD
    if not is_trained(checkpoint.parent) or not card.is_file():
        return ""
    return card.read_text(encoding="utf-8", errors="replace").partition(f"\n{COMMANDS}\n")[0]


def _text(folder: Folder) -> Iterator[str]:
    texts: dict[str, list[list[str]]] = json.loads((folder.path / SETTINGS).read_text(encoding="utf-8"))["texts"]
    for part, files in texts.items():
        names = ", ".join(f"`{name}` (SHA-256 {digest[:12]}...)" for name, digest in files[:NAMED])
        more = f" and {len(files) - NAMED} more" if len(files) > NAMED else ""
        yield f"- Files of the {PARTS[part]} part: {names}{more}"
    numbers: dict[str, int] = json.loads((folder.path / "text" / FIGURES).read_text(encoding="utf-8"))
    left_out = {rule: number for rule in RULES if (number := numbers.get(rule, 0))}
    held_out = 0 if "valid" in texts else numbers["valid"]
    yield (
        f"- Pairs: {numbers['train'] + held_out + sum(left_out.values())} read, {numbers['train']} for training, "
        f"{numbers['valid']} for validation{' (held out)' if held_out else ''}, {numbers['test']} for the test"
    )
    for rule, number in left_out.items():
        yield f"- Removed {number}: {RULES[rule]}"


def _training(log: Path) -> Iterator[str]:
    """Read the model's size, the duration and the options of the training from fairseq-train's log."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    if parameters := re.search(r"num\. (?:shared )?model params: ([\d,]+)", text):
        yield f"- Parameters: {parameters[1]}"
    if validations := [record for record in records(text) if "valid_num_updates" in record]:
        yield f"- Training: {validations[-1]['valid_num_updates']} updates, {validations[-1]['epoch']} epochs"
    if averages := re.findall(r"^(Validation .* for the average of .*)\.$", text, re.MULTILINE):
        yield f"- {averages[-1]}"
    if commands := re.findall(r"^\$ fairseq-train (.*)$", text, re.MULTILINE):
        words = shlex.split(commands[-1])
        places = {0, *(at for at, word in enumerate(words) if word in PATHS)}  # local paths are left out
        kept = (word for at, word in enumerate(words) if at not in places and at - 1 not in places - {0})
        yield f"- Options of `fairseq-train`: `{shlex.join(kept)}`"
