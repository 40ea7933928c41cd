"""Lines on which a model of ``own-data`` was not trained, and its translations of them."""

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
    """The translated lines of a part, as sacreBLEU compares them.

    Attributes:
        part: ``test`` or ``valid``.
        language: target language.
        sources: untouched source lines.
        references: their untouched translations.
        sentences: the model's n-best lists.
        left_out: number of lines of the part that are too long for the model.
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
        """Return how many lines there are, and how many were left out."""
        name = f"the {NAMES[self.part]} part"
        told = f"{self.left_out} lines of {name} are too long for the model and left out.\n\n" if self.left_out else ""
        return f"{told}{len(self.sentences)} lines of {name}, on which it was not trained:"


def scored_part(folder: Folder) -> str:
    """Return the part that own-data scores: the test part, or else the validation part."""
    return "test" if "test" in folder.parts else "valid"


def generated(results: Path, part: str) -> Path:
    """Return the file that fairseq-generate writes to a folder."""
    return results / f"generate-{part}.txt"


def generate(results: Path, part: str, options: Sequence[object]) -> None:
    """Run ``fairseq-generate`` on a part.

    Args:
        results: folder for what it writes.
        part: ``test`` or ``valid``.
        options: data, checkpoint and search.

    Raises:
        ValueError: it fails.
    """
    options = [*options, "--gen-subset", part, "--remove-bpe", "--max-tokens", 4000, "--results-path", results]
    fairseq("generate", *options, *ALL_SENTENCES, *NO_LONG_ONES)


def is_complete(path: Path, checkpoint: Path) -> bool:
    """Whether fairseq-generate came to the end of a file, and by the checkpoint that is there now."""
    if not path.exists() or path.stat().st_mtime < checkpoint.stat().st_mtime:
        return False
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 10_000))
        return file.read().rpartition(b"\nGenerate ")[1] != b""


def read_held_out(folder: Folder, results: Path, part: str) -> HeldOut:
    """Read what fairseq-generate wrote, and the untouched lines of the part.

    Raises:
        ValueError: they cannot be read, or do not fit together.
    """
    sentences = read_generated([generated(results, part)])
    pairs = list(zip(*(read_text(path, "") for path in folder.text(part)), strict=True))
    if sentences[-1].number >= len(pairs):
        raise ValueError(f"{folder.text(part)[1]} has {len(pairs)} lines, and {generated(results, part)} more")
    sources, references = zip(*(pairs[sentence.number] for sentence in sentences), strict=True)
    return HeldOut(part, folder.languages[1], sources, references, sentences, len(pairs) - len(sentences))
