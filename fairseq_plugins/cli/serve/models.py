"""Exported folders and their languages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from fairseq_plugins.cli.own_data.folder import SETTINGS

if TYPE_CHECKING:
    from fairseq_plugins.export.translate import Translator

Pair = tuple[str, str]  # source and target language

NAMES = dict(
    re.findall(
        r"(\w+)=(\w+)",
        """ar=Arabic bg=Bulgarian bn=Bengali ca=Catalan cs=Czech da=Danish de=German el=Greek en=English eo=Esperanto
        es=Spanish et=Estonian eu=Basque fa=Persian fi=Finnish fr=French ga=Irish gl=Galician he=Hebrew hi=Hindi
        hr=Croatian hu=Hungarian id=Indonesian is=Icelandic it=Italian ja=Japanese ko=Korean lt=Lithuanian lv=Latvian
        ms=Malay nb=Norwegian nl=Dutch pl=Polish pt=Portuguese ro=Romanian ru=Russian sk=Slovak sl=Slovenian
        sq=Albanian sr=Serbian sv=Swedish sw=Swahili th=Thai tl=Tagalog tr=Turkish uk=Ukrainian ur=Urdu
        vi=Vietnamese zh=Chinese""",
    )
)


def open_models(places: Iterable[str]) -> dict[Pair, Translator]:
    """Load the models of folders, and return them by their languages.

    Args:
        places: folders, optionally with languages, as in ``en:de=OUT``.

    Raises:
        ValueError: a folder does not contain an exported model, its languages are unknown, or two folders have the same
            languages.
    """
    from fairseq_plugins.export.translate import Translator  # noqa: PLC0415  (sets up the process for onnxruntime)

    models: dict[Pair, Translator] = {}
    for place in places:
        given = re.fullmatch(r"([\w-]+):([\w-]+)=(.+)", place)
        folder = find_exported(Path(given[3] if given else place))
        translator = Translator(folder, threads=1)
        pair = (given[1], given[2]) if given else languages_of(folder)
        if pair is None:
            raise ValueError(f"{folder} does not name its languages: give them, as in en:de={folder}")
        if pair in models:
            raise ValueError(
                f"{folder} and {models[pair].folder} both translate {pair[0]} to {pair[1]}: give one of them"
            )
        models[pair] = translator
    return models


def find_exported(folder: Path) -> Path:
    """Return the exported folder: the given one, or the one inside own-data's folder.

    Raises:
        ValueError: there is no exported folder, or there are several.
    """
    if not (folder / SETTINGS).is_file():
        if not (folder / "SHA256SUMS").exists():
            raise ValueError(f"{folder} is not an exported folder: create one with fairseq-plugins export")
        return folder
    found = sorted(path.parent for path in folder.glob("*/SHA256SUMS"))
    if not found:
        command = f"fairseq-plugins export {folder}/ARCH/checkpoint_best.pt {folder}/ARCH.exported"
        raise ValueError(
            f"{folder} has no exported folder: export its model with the command that own-data printed, {command} ..."
        )
    if len(found) > 1:
        raise ValueError(f"{folder} has several exported folders: give one of {', '.join(map(str, found))}")
    return found[0]


def languages_of(folder: Path) -> Pair | None:
    """Return the languages of a folder; earlier versions recorded them for Moses' tokenizer or in the model card."""
    config = json.loads((folder / "config.json").read_bytes())
    card = (
        (folder / "README.md").read_text(encoding="utf-8", errors="replace") if (folder / "README.md").is_file() else ""
    )
    named = re.search(r"^# \S+, (\S+) to (\S+)$", card, re.MULTILINE)
    for pair in (
        config.get("languages"),
        [config["source_language"], config["target_language"]],
        named and named.groups(),
    ):
        if isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(each, str) and each for each in pair):
            return pair[0], pair[1]
    return None
