"""A corpus from its files to fairseq's binary data, step by step.

In the folder are, with the names of fairseq's ``prepare-*.sh``: ``orig`` (what was downloaded), ``tmp`` (tokens),
``code`` (BPE), ``train``, ``valid``, ``test`` of both languages (subwords), and ``data-bin``; beside them the untouched
targets of the test parts, ``test.reference``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from fairseq_plugins.cli.bar import bar
from fairseq_plugins.cli.own_data import parallel_text
from fairseq_plugins.cli.prepare.originals import File, Texts, fetch, sums
from fairseq_plugins.cli.processes import fairseq


@dataclass(frozen=True)
class Corpus:
    """What to read and how to prepare it.

    Attributes:
        tests: test parts, ``test``, ``test1``, ...
        valid: the validation part; where there is none, every ``valid_every``-th pair of the training part.
        max_words: longer sentences are left out of training and validation...
        max_ratio: ... and so are pairs with so many times as many words on one side.
        tokenise: None for text that is tokenised; else the options of ``parallel_text.moses``.
        normalise: for training also normalise punctuation.
        merges: of the joint BPE; None for words.
        words: fairseq-preprocess's options for vocabularies of words.
        terms: where to get what cannot be downloaded.
        straight_apostrophes: in the tokens of test parts; not recorded, for folders were made before there was this.
    """

    source: str
    target: str
    train: Texts
    tests: tuple[Texts, ...]
    valid: Texts = ()
    valid_every: int = 100
    max_words: int = 175
    max_ratio: float | None = None
    tokenise: dict[str, bool] | None = None
    normalise: bool = False
    merges: int | None = 40000
    words: tuple[str, ...] = ()
    terms: str = ""
    straight_apostrophes: bool = field(default=False, repr=False)

    @property
    def languages(self) -> tuple[str, str]:
        return self.source, self.target

    def parts(self) -> dict[str, Texts]:
        """All parts that have files, by fairseq's names."""
        tests = {f"test{number or ''}": texts for number, texts in enumerate(self.tests)}
        return {"train": self.train, **({"valid": self.valid} if self.valid else {}), **tests}

    def files(self) -> Iterator[File]:
        """Of all parts."""
        return (file for texts in self.parts().values() for pair in texts for file in pair)


def prepare(corpus: Corpus, out: Path, orig: Path, *, words: bool = False, workers: int = 1) -> Path:
    """Go on from where the folder is.

    Args:
        words: make ``data-bin-words``, of whole words, and not ``data-bin``.

    Returns:
        the folder of binary data.

    Raises:
        ValueError, OSError: the texts cannot be had, or do not fit together; or the folder holds something else.
    """
    words = words or corpus.merges is None
    binary = binary_of(corpus, out, words)
    record, settings = out / "settings", f"{corpus}\n"
    if not record.exists():
        for path in made(corpus, out):
            if path.exists():
                raise ValueError(f"{path} is in the way of what is to be made under that name; choose another folder")
        with parallel_text.writing(record) as file:
            file.write(settings)
    elif not is_of(record, settings, sums(corpus.files(), orig)):
        raise ValueError(
            f"{out} holds other text, or text that was prepared otherwise (see {record}); choose another folder, or "
            "the texts and options of the first call"
        )
    if binary.exists():
        return binary
    tmp = out / "tmp"
    fetch([*corpus.files()], orig, unread(corpus, out, words), corpus.terms)
    if not tmp.exists() and (found := sums(corpus.files(), orig)):
        with parallel_text.writing(record) as file:
            file.write(f"{settings}{json.dumps(found)}\n")
    for part in corpus.parts():
        tokenise(corpus, part, tmp, orig, workers)
    for part in corpus.parts():
        if part.startswith("test"):
            keep_targets(corpus, part, out, orig)
        else:
            clean_and_split(corpus, part, tmp)
    if not words:
        segment(corpus, out, workers)
    binarise(corpus, tmp if words else out, binary, words, workers)
    return binary


def is_of(record: Path, settings: str, found: dict[str, str]) -> bool:
    """Whether a folder's record is of these settings and sums of texts.

    A text that has none there is taken for the right one: the record is of a former version.
    """
    text = record.read_text(encoding="utf-8")
    known = json.loads(text.removeprefix(settings) or "{}") if text.startswith(settings) else None
    return known is not None and all(known.get(path, found[path]) == found[path] for path in found)


def binary_of(corpus: Corpus, out: Path, words: bool) -> Path:
    """The folder of binary data: `data-bin-words` where there may be one of subwords, too."""
    return out / ("data-bin-words" if words and corpus.merges is not None else "data-bin")


def unread(corpus: Corpus, out: Path, words: bool) -> list[File]:
    """The files that something is still to be made of, for the binary data; none where that is there."""
    found: list[File] = []
    if binary_of(corpus, out, words).exists():
        return found
    for part, texts in corpus.parts().items():
        for number, pair in enumerate(texts):
            for language, file in zip(corpus.languages, pair, strict=True):
                is_target = part.startswith("test") and language == corpus.target
                is_read = tokens_of(out / "tmp", part, number, language).exists()
                if not is_read or (is_target and not (out / f"{part}.reference").exists()):
                    found.append(file)
    return found


def tokens_of(tmp: Path, part: str, number: int, language: str) -> Path:
    """The tokens of one text."""
    return tmp / f"{part}.{number}.tok.{language}"


def made(corpus: Corpus, out: Path) -> Iterator[Path]:
    """All files and folders that `prepare` may write."""
    for name in ("tmp", "code", "data-bin", "data-bin-words"):
        yield out / name
    for part in {**corpus.parts(), "valid": ()}:
        for end in (*corpus.languages, "reference"):
            yield out / f"{part}.{end}"


def tokenise(corpus: Corpus, part: str, tmp: Path, orig: Path, workers: int) -> None:
    """Each text by itself (``train.0.tok.en``), and those of a test part together (``test.en``)."""
    texts = corpus.parts()[part]
    for side, language in enumerate(corpus.languages):
        outputs = [tokens_of(tmp, part, number, language) for number in range(len(texts))]
        for output, pair in zip(outputs, texts, strict=True):
            if output.exists():
                continue
            make = partial(_line_function, corpus, language, part == "train")
            path = pair[side].place(orig)
            lines = bar(parallel_text.read_text(path, language), desc=f"tokenise {path.name}", unit=" lines")
            if corpus.straight_apostrophes and part.startswith("test"):
                lines = (line.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'") for line in lines)
            with parallel_text.writing(output) as file:
                file.writelines(f"{line}\n" for line in parallel_text.each_line(make, lines, workers))
        if part.startswith("test"):
            parallel_text.concatenate(outputs, tmp / f"{part}.{language}", language)


def keep_targets(corpus: Corpus, part: str, out: Path, orig: Path) -> None:
    """The untouched targets of a test part.

    Raises:
        ValueError: its sides have different numbers of lines.
    """
    reference = out / f"{part}.reference"
    if not reference.exists():
        targets = [target.place(orig) for _, target in corpus.parts()[part]]
        parallel_text.concatenate(targets, reference, corpus.target)
    for _ in parallel_text.read_pairs(*(out / "tmp" / f"{part}.{language}" for language in corpus.languages)):
        pass


def _line_function(corpus: Corpus, language: str, training: bool) -> parallel_text.Line:
    if corpus.tokenise is None:
        return lambda line: " ".join(line.split())
    return parallel_text.moses(language, normalise=training and corpus.normalise, **corpus.tokenise)


def clean_and_split(corpus: Corpus, part: str, tmp: Path) -> None:
    """``train`` and ``valid``, or one of them where each has texts of its own.

    Raises:
        ValueError: nothing is left.
    """
    outputs = {name: tuple(tmp / f"{name}.{language}" for language in corpus.languages) for name in ("train", "valid")}
    every = None if corpus.valid else corpus.valid_every
    wanted = outputs if every else {"train": outputs[part]}
    if not all(path.exists() for paths in wanted.values() for path in paths):
        pairs = (
            pair
            for number in range(len(corpus.parts()[part]))
            for pair in parallel_text.read_pairs(
                *(tokens_of(tmp, part, number, language) for language in corpus.languages)
            )
        )
        cleaned = parallel_text.clean(pairs, corpus.max_words, corpus.max_ratio)
        parallel_text.split(cleaned, every, wanted)  # type: ignore[arg-type]
    for paths in wanted.values():
        if paths[0].stat().st_size == 0:
            texts = ", ".join(file.path for pair in corpus.parts()[part] for file in pair)
            raise ValueError(
                f"{paths[0]} is empty: too few pairs of {texts} have words on both sides, {corpus.max_words} at most"
            )


def segment(corpus: Corpus, out: Path, workers: int) -> None:
    """The joint BPE of the training part, applied everywhere."""
    tmp, codes = out / "tmp", out / "code"
    if not codes.exists():
        training = [tmp / f"train.{language}" for language in corpus.languages]
        parallel_text.learn_codes(training, corpus.merges or 0, codes)
    for part in {**corpus.parts(), "valid": ()}:
        for language in corpus.languages:
            output = out / f"{part}.{language}"
            if not output.exists():
                parallel_text.apply_codes(codes, tmp / output.name, output, workers)


def binarise(corpus: Corpus, folder: Path, binary: Path, words: bool, workers: int) -> None:
    """``fairseq-preprocess``; subwords share one dictionary, so that embeddings can be tied."""
    unfinished = binary.with_name(binary.name + ".partial")
    shutil.rmtree(unfinished, ignore_errors=True)  # fairseq refuses to write over dictionaries
    tests = [str(folder / part) for part in corpus.parts() if part.startswith("test")]
    options = ["--source-lang", corpus.source, "--target-lang", corpus.target, "--destdir", unfinished]
    options += ["--trainpref", folder / "train", "--validpref", folder / "valid", "--workers", workers]
    options += ["--testpref", ",".join(tests)] if tests else []
    fairseq("preprocess", *options, *(corpus.words if words else ["--joined-dictionary"]))
    unfinished.rename(binary)
