"""The folder OUT of ``own-data``: text, subwords and fairseq's binary data; existing files are not created again.

``text`` contains the cleaned lines of each part.  ``train.en`` and similar files contain their subwords.  ``data-bin``
contains the binary data.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fairseq_plugins.cli.files import digest
from fairseq_plugins.cli.own_data import parallel_text, pieces
from fairseq_plugins.cli.own_data.cleaning import clean, report
from fairseq_plugins.cli.own_data.texts import FilePair, read_pairs
from fairseq_plugins.cli.processes import fairseq
from fairseq_plugins.common.files import beside, replacing

SETTINGS = "settings"
FIGURES = "figures.json"  # report of the cleaning, in the folder ``text``
TOKENIZERS = ("sentencepiece", "moses")
# Numbers of BPE merges, by the largest number of training pairs. 6000 merges were best for 29 000 image captions, and
# fairseq's IWSLT'14 recipe uses 10 000 for 160 000 pairs.
MERGES = {20_000: 2000, 100_000: 6000, 1_000_000: 10_000}
MOST_MERGES = 40_000
BEAM = 5
BEST = "checkpoint_best.pt"


@dataclass(frozen=True)
class Folder:
    """Paths and languages of one folder.

    Attributes:
        path: the folder.
        languages: source and target.
        tokenizer: one of `TOKENIZERS`.
    """

    path: Path
    languages: tuple[str, str]
    tokenizer: str

    @property
    def binary(self) -> Path:
        """Return the folder of binary data."""
        return self.path / "data-bin"

    @property
    def subwords(self) -> Path:
        """Return the file of the sentencepiece model or of the BPE codes."""
        return self.path / ("subwords.model" if self.tokenizer == "sentencepiece" else "code")

    @property
    def parts(self) -> list[str]:
        """Return the parts that have text."""
        return [part for part in ("train", "valid", "test") if self.text(part)[0].exists()]

    def text(self, part: str) -> tuple[Path, Path]:
        """Return the source and target file of a part's text."""
        return self._files(self.path / "text", part)

    def segmented(self, part: str) -> tuple[Path, Path]:
        """Return the source and target file of a part's subwords."""
        return self._files(self.path, part)

    def _files(self, folder: Path, part: str) -> tuple[Path, Path]:
        source, target = self.languages
        return folder / f"{part}.{source}", folder / f"{part}.{target}"

    def fairseq_options(self) -> list[object]:
        """Return options of fairseq's commands that describe the model's preprocessing."""
        if self.tokenizer == "sentencepiece":
            # No source word is unknown, so no translation needs an unknown word.
            return ["--bpe", "sentencepiece", "--sentencepiece-model", self.subwords, "--unkpen", 1000]
        return ["--tokenizer", "moses", "--bpe", "subword_nmt", "--bpe-codes", self.subwords]

    def decoding_options(self, checkpoint: Path, user_dir: Path) -> list[object]:
        """Return options of fairseq's commands for translating with a model."""
        source, target = self.languages
        options: list[object] = [self.binary, "--source-lang", source, "--target-lang", target, "--user-dir", user_dir]
        options += ["--path", checkpoint, "--beam", BEAM, "--task", "translation_fast"]
        return [*options, *self.fairseq_options()]

    def segmenter(self) -> parallel_text.Line:
        """Return a function that turns a line of source text into subwords."""
        if self.tokenizer == "sentencepiece":
            return pieces.segmenter(self.subwords)
        tokenize, segment = parallel_text.moses(self.languages[0]), parallel_text.segmenter(self.subwords)
        return lambda line: segment(tokenize(line))

    def export_options(self) -> list[object]:
        """Return options of ``fairseq-plugins export`` that describe the model's preprocessing."""
        if self.tokenizer == "sentencepiece":
            return ["--data", self.binary, "--sentencepiece-model", self.subwords]
        return ["--data", self.binary, "--bpe-codes", self.subwords, "--tokenizer", "moses"]


def existing(path: Path) -> Folder | None:
    """Return the folder that an earlier call of own-data created at ``path``, or None."""
    record = path / SETTINGS
    if not record.exists():
        return None
    text = record.read_text(encoding="utf-8")
    if before_0_2 := re.match(r"Corpus\(source='([^']+)', target='([^']+)'", text):
        return Folder(path, (before_0_2[1], before_0_2[2]), "moses")
    settings = json.loads(text)
    return Folder(path, tuple(settings["languages"]), settings["tokenizer"])


def open_folder(path: Path) -> Folder:
    """Return the folder of an earlier call; it must contain text and binary data.

    Raises:
        ValueError: the folder is missing or incomplete.
    """
    folder = existing(path)
    if folder is None:
        raise ValueError(f"{path} is not a folder of own-data (no file {SETTINGS}): give the OUT of own-data")
    # A folder that an earlier version began may be incomplete, for example.
    if not folder.binary.exists() or not (path / "text").exists():
        raise ValueError(f"{path} has no text or no binary data yet: run own-data again to complete it")
    return folder


def prepare(
    folder: Folder,
    texts: Mapping[str, Sequence[FilePair]],
    keep: Set[str] = frozenset(),
    workers: int = 1,
    base: Folder | None = None,
) -> None:
    """Create the files of the folder that are missing.

    Args:
        folder: the folder.
        texts: files of ``train``, and optionally of ``valid`` and ``test``.
        keep: cleaning rules to switch off.
        workers: number of processes.
        base: folder whose subwords and dictionary are reused; if None, they are learned from the text.

    Raises:
        ValueError: the folder has other text or options, or a text is unusable.
        OSError: a text cannot be read.
    """
    record = folder.path / SETTINGS
    before = record.read_text(encoding="utf-8") if record.exists() else None
    if before is not None and before.startswith("Corpus("):
        adopt(folder)
        return
    now = {
        "languages": list(folder.languages),
        "tokenizer": folder.tokenizer,
        "keep": sorted(keep),
        "subwords": None if base is None else digest(base.subwords, "sha256"),
        "texts": {
            part: [[file.name, digest(file, "sha256")] for pair in files for file in dict.fromkeys(pair)]
            for part, files in texts.items()
        },
    }
    text = folder.path / "text"
    if before is None:
        made = [
            text,
            folder.binary,
            *(folder.path / name for name in ("subwords.model", "code", "tokens", "pieces.txt")),
        ]
        for path in (*made, *(path for part in ("train", "valid", "test") for path in folder.segmented(part))):
            if path.exists():
                raise ValueError(f"{path} already exists and was not created by own-data: choose another folder")
    elif text.exists() and json.loads(before) != now:
        raise ValueError(
            f"{folder.path} has other text or options (see {record}): choose another folder, or repeat the texts and "
            "options of the first call"
        )
    if not text.exists():
        folder.path.mkdir(parents=True, exist_ok=True)
        with beside(text) as unfinished:
            unfinished.mkdir()
            parts = {part: read_pairs(files, folder.languages) for part, files in texts.items()}
            figures = clean(parts, folder.languages, unfinished, keep)
            (unfinished / FIGURES).write_text(json.dumps(figures), encoding="utf-8")
            with parallel_text.writing(record) as file:
                file.write(json.dumps(now, indent=1) + "\n")
        print(report(figures), file=sys.stderr)
    if not folder.binary.exists():
        if base is not None and not folder.subwords.exists():
            with replacing(folder.subwords) as unfinished:
                shutil.copyfile(base.subwords, unfinished)
        (segment_pieces if folder.tokenizer == "sentencepiece" else segment_words)(folder, workers)
        binarise(folder, workers, base)


def adopt(folder: Folder) -> None:
    """Restore the text of held-out parts in a folder of version 0.1, which stored only Moses' tokens.

    Raises:
        ValueError: the folder has no binary data.
    """
    if not folder.binary.exists():
        raise ValueError(
            f"{folder.path} is an incomplete folder of an earlier version: remove it, or choose another folder"
        )
    if (folder.path / "text").exists():
        return
    from sacremoses import MosesDetokenizer  # noqa: PLC0415  (takes half a second to import)

    with beside(folder.path / "text") as unfinished:
        unfinished.mkdir()
        for part in ("valid", "test"):
            for language in folder.languages:
                tokens, untouched = folder.path / "tmp" / f"{part}.{language}", folder.path / f"{part}.reference"
                if language == folder.languages[1] and untouched.exists():
                    shutil.copyfile(untouched, unfinished / f"{part}.{language}")
                elif tokens.exists():
                    detokenise = MosesDetokenizer(language).detokenize
                    with parallel_text.writing(unfinished / f"{part}.{language}") as file:
                        file.writelines(f"{detokenise(line.split())}\n" for line in parallel_text.read_text(tokens, ""))


def merges_for(pairs: int) -> int:
    """Return the number of BPE merges for a number of training pairs."""
    return next((merges for limit, merges in MERGES.items() if pairs < limit), MOST_MERGES)


def count_lines(path: Path) -> int:
    """Return the number of lines of a file."""
    with path.open("rb") as file:
        return sum(1 for _ in file)


def segment_pieces(folder: Folder, workers: int) -> None:
    """Learn sentencepiece subwords from the training part, and segment all parts."""
    if not folder.subwords.exists():
        pairs = count_lines(folder.text("train")[0])
        pieces.learn(folder.text("train"), 2 * pairs, merges_for(pairs), folder.subwords)
    for part in folder.parts:
        for text, output in zip(folder.text(part), folder.segmented(part), strict=True):
            if not output.exists():
                pieces.segment(folder.subwords, text, output)


def segment_words(folder: Folder, workers: int) -> None:
    """Tokenise with Moses, learn subword-nmt's BPE from the training part, and segment all parts."""
    tokens = folder.path / "tokens"
    for part in folder.parts:
        for language, text in zip(folder.languages, folder.text(part), strict=True):
            output = tokens / text.name
            if not output.exists():
                lines = parallel_text.read_text(text, "")
                make = partial(parallel_text.moses, language)
                with parallel_text.writing(output) as file:
                    file.writelines(f"{line}\n" for line in parallel_text.each_line(make, lines, workers))
    if not folder.subwords.exists():
        train = [tokens / path.name for path in folder.text("train")]
        parallel_text.learn_codes(train, merges_for(count_lines(train[0])), folder.subwords)
    for part in folder.parts:
        for output in folder.segmented(part):
            if not output.exists():
                parallel_text.apply_codes(folder.subwords, tokens / output.name, output, workers)


def binarise(folder: Folder, workers: int, base: Folder | None) -> None:
    """Run ``fairseq-preprocess`` with a joined dictionary, so that embeddings can be tied."""
    unfinished = folder.binary.with_name("data-bin.partial")
    shutil.rmtree(unfinished, ignore_errors=True)  # fairseq refuses to overwrite dictionaries
    source, target = folder.languages
    options = ["--source-lang", source, "--target-lang", target, "--destdir", unfinished, "--joined-dictionary"]
    options += ["--workers", workers]
    options += [word for part in folder.parts for word in (f"--{part}pref", folder.path / part)]
    if folder.tokenizer == "sentencepiece":  # all pieces, even pieces that the text does not use
        pieces.write_dictionary(folder.subwords, folder.path / "pieces.txt")
        options += ["--srcdict", folder.path / "pieces.txt"]
    elif base is not None:
        options += ["--srcdict", base.binary / f"dict.{source}.txt"]
    fairseq("preprocess", *options)
    unfinished.rename(folder.binary)
