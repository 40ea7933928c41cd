"""Held-out text of ``own-data`` and its translations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fairseq_plugins.cli.generated import Sentence, read_generated
from fairseq_plugins.cli.own_data.folder import Folder
from fairseq_plugins.cli.own_data.parallel_text import read_text
from fairseq_plugins.cli.processes import ALL_SENTENCES, NO_LONG_ONES, fairseq

NAMES = {"test": "test", "valid": "validation"}


@dataclass(frozen=True)
class HeldOut:
    """The translated lines of a held-out part.

    Attributes:
        part: ``test`` or ``valid``.
        language: target language.
        sources: source lines before preprocessing.
        references: target lines before preprocessing.
        sentences: n-best lists of the model.
        left_out: number of lines that are too long for the model.
    """

    part: str
    language: str
    sources: Sequence[str]
    references: Sequence[str]
    sentences: Sequence[Sentence]
    left_out: int

    @property
    def translations(self) -> list[str]:
        """Return the best translation of each line."""
        return [sentence.hypotheses[0].text for sentence in self.sentences]

    def describe(self) -> str:
        """Return the number of scored lines, and of lines that were skipped."""
        skipped = f"; skipped, too long for the model: {self.left_out}" if self.left_out else ""
        return f"Scores on the {NAMES[self.part]} part (held-out lines: {len(self.sentences)}{skipped}):"


def scored_part(folder: Folder) -> str:
    """Return the part to score: ``test`` if there is one, otherwise ``valid``."""
    return "test" if "test" in folder.parts else "valid"


def generated(results: Path, part: str) -> Path:
    """Return the path of fairseq-generate's output in a folder."""
    return results / f"generate-{part}.txt"


def generate(results: Path, part: str, options: Sequence[object]) -> None:
    """Run ``fairseq-generate`` on a part.

    Args:
        results: folder for its output.
        part: ``test`` or ``valid``.
        options: data, checkpoint and search.

    Raises:
        ValueError: fairseq-generate fails.
    """
    options = [*options, "--gen-subset", part, "--remove-bpe", "--max-tokens", 4000, "--results-path", results]
    fairseq("generate", *options, *ALL_SENTENCES, *NO_LONG_ONES)


def is_complete(path: Path, checkpoint: Path) -> bool:
    """Return whether a file is complete output of fairseq-generate for the current checkpoint."""
    if not path.exists() or path.stat().st_mtime < checkpoint.stat().st_mtime:
        return False
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 10_000))
        return file.read().rpartition(b"\nGenerate ")[1] != b""


def read_held_out(folder: Folder, results: Path, part: str) -> HeldOut:
    """Read the output of fairseq-generate, and the text of the part before preprocessing.

    Raises:
        ValueError: a file is unreadable, or the numbers of lines differ.
    """
    sentences = read_generated([generated(results, part)])
    pairs = list(zip(*(read_text(path, "") for path in folder.text(part)), strict=True))
    if sentences[-1].number >= len(pairs):
        raise ValueError(
            f"{generated(results, part)} has more sentences than {folder.text(part)[1]} ({len(pairs)} lines): remove "
            "it and run the command again"
        )
    sources, references = zip(*(pairs[sentence.number] for sentence in sentences), strict=True)
    return HeldOut(part, folder.languages[1], sources, references, sentences, len(pairs) - len(sentences))
