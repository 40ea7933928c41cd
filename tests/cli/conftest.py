"""Calls of commands in this process, and texts for tests of own-data."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from fairseq_plugins.cli import main as cli


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return texts like image captions: untokenised, without repeated sentences."""
    folder = tmp_path_factory.mktemp("texts")
    generator = random.Random(1)
    nouns = {"dog": "Hund", "man": "Mann", "well-known boat": "bekanntes Boot", "horse": "Pferd"}
    number = 0
    for part, size in (("train", 300), ("test", 7)):
        pairs = []
        for place in range(size):
            first, second = generator.choices(list(nouns), k=2)
            number += 1
            # Two lines are too long for a model of `TINY`; one of them is in the validation part.
            much = "".join(f" {n}" for n in range(100)) if place in (1, 19) else ""
            pairs.append(
                (
                    f"A {first}, and{much} a {second} {number}.",
                    f"Ein {nouns[first]}, und{much} ein {nouns[second]} {number}.",
                )
            )
        for language, lines in zip(("en", "de"), zip(*pairs, strict=True), strict=True):
            (folder / f"{part}.{language}").write_text("".join(f"{line}\n" for line in lines))
    return folder


def parse(*words: object) -> Any:
    return cli.parse(["own-data", *map(str, words)])


def tool(*words: object) -> None:
    cli.main([*map(str, words)])


def refused(*words: object) -> str:
    """Return the error of a command."""
    with pytest.raises(SystemExit) as stopped:
        tool(*words)
    return str(stopped.value)
