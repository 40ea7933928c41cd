"""The model card of ``own-data``: text, training and scores of a model.

The card is the README.md in the folder of the checkpoints.  Exported folders contain the card without its commands.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path

import fairseq_plugins
from fairseq_plugins.cli.own_data.cleaning import RULES
from fairseq_plugins.cli.own_data.folder import SETTINGS, Folder
from fairseq_plugins.cli.own_data.held_out import NAMES
from fairseq_plugins.cli.own_data.parallel_text import read_text, writing
from fairseq_plugins.cli.own_data.trained import FINISHED, Base, is_trained
from fairseq_plugins.cli.plot_loss import LOG, records
from fairseq_plugins.cli.score import Scores

CARD = "README.md"
COMMANDS = "## Commands"  # Exported folders contain the card up to this heading.
KINDS = {"sentencepiece": "sentencepiece BPE", "moses": "Moses' tokens with subword-nmt's BPE"}
SHOWN = 20  # named text files
PATHS = ("--user-dir", "--save-dir", "--finetune-from-model")  # options whose values are local paths


def write_card(folder: Folder, model: Path, scores: Scores, base: Base | None, commands: Mapping[str, str]) -> None:
    """Write the card of a trained model.

    Args:
        folder: folder of the training text.
        model: folder of the checkpoints.
        scores: scores of the model.
        base: base model, if the model is an adaptation.
        commands: shell commands by their purpose.
    """
    with writing(model / CARD) as file:
        file.writelines(f"{line}\n" for line in _lines(folder, model, scores, base))
        file.write(f"\n{COMMANDS}\n")
        file.writelines(f"\n{what}:\n\n    {words}\n" for what, words in commands.items())


def card_of(checkpoint: Path) -> str:
    """Return the card of a checkpoint of own-data without its commands, or an empty string."""
    card = checkpoint.parent / CARD
    if not is_trained(checkpoint.parent) or not card.is_file():
        return ""
    return card.read_text(encoding="utf-8", errors="replace").partition(f"\n{COMMANDS}\n")[0]


def _lines(folder: Folder, model: Path, scores: Scores, base: Base | None) -> Iterator[str]:
    source, target = folder.languages
    day = date.fromtimestamp((model / FINISHED).stat().st_mtime)
    yield f"# {model.name}, {source} to {target}"
    yield ""
    yield f"`fairseq-plugins own-data`, version {fairseq_plugins.__version__}, trained this translation model on {day}."
    yield ""
    yield "## Text"
    yield ""
    yield from _text(folder)
    yield "- Licence of the text: unknown to this program"
    yield ""
    yield "## Model"
    yield ""
    yield f"- Architecture: `{model.name}`"
    if base is not None:
        yield f"- Adapted from: `{base.checkpoint.name}` of the folder `{base.folder.path.resolve().name}`"
    yield from _training(model / LOG)
    words = sum(1 for _ in read_text(folder.binary / f"dict.{source}.txt", ""))
    yield f"- Subwords: {KINDS[folder.tokenizer]}; {words} entries in the shared dictionary"
    yield ""
    yield "## Scores"
    yield ""
    held_out = scores.held_out
    yield f"- Held-out lines of the {NAMES[held_out.part]} part: {len(held_out.sentences)}" + (
        " (they also decided when to stop training)" if held_out.part == "valid" else ""
    )
    if held_out.left_out:
        yield f"- Skipped lines, too long for the model: {held_out.left_out}"
    yield f"- BLEU {scores.bleu:.1f} (sacreBLEU `{scores.bleu_signature}`)"
    yield f"- chrF {scores.chrf:.1f} (sacreBLEU `{scores.chrf_signature}`)"
    yield "- `checkpoint_best.pt`, beam 5, untouched references"


def _text(folder: Folder) -> Iterator[str]:
    record, figures = folder.path / SETTINGS, folder.path / "text" / "figures.json"
    if not figures.exists():
        yield "- Files and sizes: not recorded by the earlier version that prepared the text"
        return
    texts: dict[str, list[list[str]]] = json.loads(record.read_text(encoding="utf-8"))["texts"]
    for part, files in texts.items():
        names = ", ".join(f"`{name}` (SHA-256 {digest[:12]}...)" for name, digest in files[:SHOWN])
        more = f" and {len(files) - SHOWN} more" if len(files) > SHOWN else ""
        yield f"- Files of the {NAMES.get(part, 'training')} part: {names}{more}"
    numbers: dict[str, int] = json.loads(figures.read_text(encoding="utf-8"))
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
    parameters, options, epochs, updates = "", "", 0, 0
    for line in log.open(encoding="utf-8", errors="replace") if log.exists() else ():
        if found := re.search(r"num\. (?:shared )?model params: ([\d,]+)", line):
            parameters = parameters or found[1]
        elif line.startswith("$ fairseq-train "):
            options = _without_paths(shlex.split(line)[2:])
        for record in records(line):
            if "valid_num_updates" in record:
                epochs, updates = int(record["epoch"]), int(record["valid_num_updates"])
    if parameters:
        yield f"- Parameters: {parameters}"
    if updates:
        yield f"- Training: {updates} updates, {epochs} epochs"
    if options:
        yield f"- Options of `fairseq-train`: `{options}`"


def _without_paths(words: list[str]) -> str:
    """Return options of fairseq-train as text, without the data folder and other local paths."""
    places = {at for at, word in enumerate(words) if word in PATHS}
    return shlex.join(word for at, word in enumerate(words) if at and at not in places and at - 1 not in places)
