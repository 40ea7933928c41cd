"""The card of a trained model: where it comes from, how good it is, and how to translate with it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from fairseq_plugins.cli.own_data.cleaning import RULES
from fairseq_plugins.cli.own_data.folder import FIGURES, SETTINGS, Folder
from fairseq_plugins.cli.own_data.parallel_text import writing
from fairseq_plugins.cli.own_data.scores import Scored
from fairseq_plugins.cli.own_data.trained import BEST, TrainedModel

CARD = "README.md"


def write_card(
    folder: Folder, model: Path, options: Sequence[str], scored: Scored, base: TrainedModel | None, command: str
) -> None:
    """Write the card beside the checkpoints, in Markdown.

    Args:
        folder: its text.
        model: folder of its checkpoints, named after the architecture.
        options: of fairseq-train, besides own-data's.
        scored: its scores.
        base: the model that it was adapted from.
        command: that translates with it.
    """
    source, target = folder.languages
    trained = datetime.fromtimestamp((model / BEST).stat().st_mtime, tz=timezone.utc)
    words = sum(1 for _ in (folder.binary / f"dict.{target}.txt").open(encoding="utf-8"))
    rows = {
        "languages": f"{source} to {target}",
        "architecture": f"`{model.name}` of fairseq_plugins",
        **_text(folder),
        "subwords": f"{folder.tokenizer}, {words} in one vocabulary for both languages",
        "training": f"by own-data{f' with `{shlex.join(options)}`' if options else ''}, finished on {trained:%Y-%m-%d}",
        "scores": str(scored).replace("\n", " "),
    }
    if base is not None:
        rows["adapted from"] = str(base.checkpoint)
    table = "".join(f"| {name} | {value.replace('|', chr(92) + '|')} |\n" for name, value in rows.items())
    with writing(model / CARD) as file:
        file.write(
            f"# A model that translates {source} to {target}\n\n| | |\n|---|---|\n{table}\n"
            "The licence of the text decides what the model may be used for; this card does not know it.\n"
            f"\n## Translate\n\n    {command}\n"
        )


def _text(folder: Folder) -> dict[str, str]:
    """Return the files of the text, and what became of their pairs; nothing for a folder of an earlier version."""
    figures = folder.path / "text" / FIGURES
    if not figures.exists():
        return {}
    numbers = json.loads(figures.read_text(encoding="utf-8"))
    texts = json.loads((folder.path / SETTINGS).read_text(encoding="utf-8"))["texts"]
    names = [
        f"{part}: {', '.join(name for name, _ in files[:4])}{', ...' if len(files) > 4 else ''}"
        for part, files in texts.items()
    ]
    kept = ", ".join(f"{part} {numbers[part]}" for part in ("train", "valid", "test") if numbers[part])
    left_out = [f"{numbers[rule]} pairs {meaning}" for rule, meaning in RULES.items() if numbers.get(rule)]
    rows = {"text": "; ".join(names), "pairs": kept}
    return rows | ({"left out of training": "; ".join(left_out)} if left_out else {})
