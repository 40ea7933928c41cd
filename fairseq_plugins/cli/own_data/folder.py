"""The folder of ``own-data``: its text, its subwords and fairseq's binary data, each made once.

``text`` holds the cleaned lines of each part; ``train.en`` and the like their subwords; ``data-bin`` the binary data.
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

from fairseq_plugins.cli.fairseq_command import fairseq
from fairseq_plugins.cli.own_data import parallel_text, pieces
from fairseq_plugins.cli.own_data.cleaning import clean, report
from fairseq_plugins.cli.own_data.texts import FilePair, read_pairs
from fairseq_plugins.cli.prepare.download import digest
from fairseq_plugins.common.whole_file import beside

SETTINGS = "settings"
TOKENIZERS = ("sentencepiece", "moses")
# Of image captions 6000 merges were best for 29 000 pairs; fairseq's IWSLT'14 has 10 000 for 160 000.
MERGES = {20_000: 2000, 100_000: 6000, 1_000_000: 10_000}
MOST_MERGES = 40_000
BEAM = 5


@dataclass(frozen=True)
class Folder:
    """Files and languages of one folder.

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
        """Return the files of a part's lines, source and target."""
        return self._files(self.path / "text", part)

    def segmented(self, part: str) -> tuple[Path, Path]:
        """Return the files of a part's subwords, source and target."""
        return self._files(self.path, part)

    def _files(self, folder: Path, part: str) -> tuple[Path, Path]:
        source, target = self.languages
        return folder / f"{part}.{source}", folder / f"{part}.{target}"

    def fairseq_options(self) -> list[object]:
        """Return options with which fairseq's commands read text as the model does."""
        if self.tokenizer == "sentencepiece":
            return ["--bpe", "sentencepiece", "--sentencepiece-model", self.subwords]
        return ["--tokenizer", "moses", "--bpe", "subword_nmt", "--bpe-codes", self.subwords]

    def decoding_options(self, model: Path, user_dir: Path) -> list[object]:
        """Return options with which fairseq's commands translate with the best checkpoint of a model."""
        source, target = self.languages
        options: list[object] = [self.binary, "--source-lang", source, "--target-lang", target, "--user-dir", user_dir]
        options += ["--path", model / "checkpoint_best.pt", "--beam", BEAM, "--task", "translation_fast"]
        return [*options, *self.fairseq_options()]

    def segmenter(self) -> parallel_text.Line:
        """Return a function that turns a line of source text into subwords."""
        if self.tokenizer == "sentencepiece":
            return pieces.segmenter(self.subwords)
        tokenize, segment = parallel_text.moses(self.languages[0]), parallel_text.segmenter(self.subwords)
        return lambda line: segment(tokenize(line))

    def export_options(self) -> list[object]:
        """Return options of ``fairseq-plugins export`` for such text."""
        if self.tokenizer == "sentencepiece":
            return ["--data", self.binary, "--sentencepiece-model", self.subwords]
        return ["--data", self.binary, "--bpe-codes", self.subwords, "--tokenizer", "moses"]


def tokenizer_of(path: Path) -> str | None:
    """Return what a folder was begun with; None if it was not begun, Moses if by a version before 0.2."""
    record = path / SETTINGS
    if not record.exists():
        return None
    text = record.read_text(encoding="utf-8")
    return "moses" if text.startswith("Corpus(") else str(json.loads(text)["tokenizer"])


def open_folder(path: Path) -> Folder:
    """Return a folder with the binary data of an earlier call.

    Raises:
        ValueError: there is none.
    """
    tokenizer = tokenizer_of(path)
    if tokenizer is None:
        raise ValueError(f"{path} is not a folder of own-data: it has no file {SETTINGS}")
    for data in (path / "data-bin").glob("train.*.idx"):
        if found := re.fullmatch(r"train\.(.+)-(.+)\.\1\.idx", data.name):
            return Folder(path, (found[1], found[2]), tokenizer)
    raise ValueError(f"{path} has no data yet: call own-data again, which goes on from where it was stopped")


def prepare(
    folder: Folder, texts: Mapping[str, Sequence[FilePair]], keep: Set[str] = frozenset(), workers: int = 1
) -> None:
    """Make what is missing in the folder.

    Args:
        folder: what is to be made.
        texts: files of ``train`` and perhaps of ``valid`` and ``test``.
        keep: rules of cleaning that are not applied.
        workers: number of processes.

    Raises:
        ValueError: the folder holds other text or was made with other options, or a text cannot be used.
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
        "texts": {
            part: [[file.name, digest(file, "sha256")] for pair in files for file in dict.fromkeys(pair)]
            for part, files in texts.items()
        },
    }
    if before is None:
        for path in (folder.path / "text", folder.binary, *(folder.path / name for name in ("subwords.model", "code"))):
            if path.exists():
                raise ValueError(f"{path} already exists and was not created by own-data: choose another folder")
        with parallel_text.writing(record) as file:
            file.write(json.dumps(now, indent=1) + "\n")
    elif json.loads(before) != now:
        raise ValueError(
            f"{folder.path} holds other text, or was made with other options (see {record}): choose another folder, "
            "or give the texts and options of the first call"
        )
    if not (folder.path / "text").exists():
        with beside(folder.path / "text") as unfinished:
            unfinished.mkdir()
            parts = {part: read_pairs(files, folder.languages) for part, files in texts.items()}
            figures = clean(parts, folder.languages, unfinished, keep)
            (unfinished / "figures.json").write_text(json.dumps(figures), encoding="utf-8")
            print(report(figures), file=sys.stderr)
    if not folder.binary.exists():
        (segment_pieces if folder.tokenizer == "sentencepiece" else segment_words)(folder, workers)
        binarise(folder, workers)


def adopt(folder: Folder) -> None:
    """Give a folder of a version before 0.2 the text of its held-out parts, which it kept as Moses' tokens.

    Raises:
        ValueError: its binary data was not finished.
    """
    if not folder.binary.exists():
        raise ValueError(
            f"{folder.path} was begun by an earlier version, which had not finished its data: remove it, or choose "
            "another folder"
        )
    if (folder.path / "text").exists():
        return
    from sacremoses import MosesDetokenizer  # noqa: PLC0415  (half a second)

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
    """Return the number of merges that so much text bears."""
    return next((merges for limit, merges in MERGES.items() if pairs < limit), MOST_MERGES)


def count_lines(path: Path) -> int:
    """Return the number of lines of a file of `text`."""
    with path.open("rb") as file:
        return sum(1 for _ in file)


def segment_pieces(folder: Folder, workers: int) -> None:
    """Learn pieces of sentencepiece from the training part, and write all parts in them."""
    if not folder.subwords.exists():
        pairs = count_lines(folder.text("train")[0])
        pieces.learn(folder.text("train"), 2 * pairs, merges_for(pairs), folder.subwords)
    for part in folder.parts:
        for text, output in zip(folder.text(part), folder.segmented(part), strict=True):
            if not output.exists():
                pieces.segment(folder.subwords, text, output)


def segment_words(folder: Folder, workers: int) -> None:
    """Make Moses' tokens, learn BPE of subword-nmt from those of the training part, and write all parts in it."""
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


def binarise(folder: Folder, workers: int) -> None:
    """Run ``fairseq-preprocess``; both languages share one dictionary, so that embeddings can be tied."""
    unfinished = folder.binary.with_name("data-bin.partial")
    shutil.rmtree(unfinished, ignore_errors=True)  # fairseq refuses to write over dictionaries
    source, target = folder.languages
    options = ["--source-lang", source, "--target-lang", target, "--destdir", unfinished, "--joined-dictionary"]
    options += ["--workers", workers]
    options += [word for part in folder.parts for word in (f"--{part}pref", folder.path / part)]
    if folder.tokenizer == "sentencepiece":  # all pieces, also those that the text does not need
        pieces.write_dictionary(folder.subwords, folder.path / "pieces.txt")
        options += ["--srcdict", folder.path / "pieces.txt"]
    fairseq("preprocess", *options)
    unfinished.rename(folder.binary)
