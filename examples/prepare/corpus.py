"""Preparation of a corpus, from downloaded files to fairseq's binary data.

The files in the folder have the same names as in fairseq's ``prepare-*.sh``: ``orig`` (downloads), ``tmp`` (tokens),
``code`` (BPE codes), ``train``, ``valid`` and ``test`` in both languages (subwords), and ``data-bin``.
``test.reference`` is the untokenised target of the test part.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from downloads import File, Texts, fetch, fingerprints
from sacremoses import MosesPunctNormalizer, MosesTokenizer

from fairseq_plugins.cli import parallel_text
from fairseq_plugins.cli.parallel_text import bar
from fairseq_plugins.cli.processes import fairseq


@dataclass(frozen=True)
class Corpus:
    """Files of a corpus and options of their preparation, as recorded in the file ``settings`` of the folder.

    Attributes:
        tests: test parts, named ``test``, ``test1``, ...
        valid: validation part; by default every ``valid_every``-th pair of the training part.
        max_words: maximum number of words of a sentence in training and validation.
        max_ratio: maximum ratio of the two sides' lengths in training and validation.
        tokenise: options of `moses`; None if the text is tokenised already.
        normalise: whether to normalise the punctuation of training text.
        merges: number of merges of the joint BPE; None for whole words.
        words: options of fairseq-preprocess for data of whole words.
        terms: message that says how to get files that cannot be downloaded.
        straight_apostrophes: whether to replace curly apostrophes in test parts.  The file ``settings`` does not
            record this option, so that folders that were prepared before the option existed are still accepted.
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
        """Return the texts of each part that has files; the keys are fairseq's names, such as ``valid``."""
        tests = {f"test{number or ''}": texts for number, texts in enumerate(self.tests)}
        return {"train": self.train, **({"valid": self.valid} if self.valid else {}), **tests}

    def files(self) -> Iterator[File]:
        """Yield the files of all parts."""
        return (file for texts in self.parts().values() for pair in texts for file in pair)


def prepare(corpus: Corpus, out: Path, orig: Path, *, words: bool = False, workers: int = 1) -> Path:
    """Prepare a corpus; results that the folder already contains are kept.

    Args:
        corpus: the corpus.
        out: folder of the results.
        orig: folder of the downloads.
        words: write ``data-bin-words``, with whole words as tokens, instead of ``data-bin``.
        workers: number of processes.

    Returns:
        the folder of binary data.

    Raises:
        ValueError, OSError: a text is missing or malformed, or the folder was prepared with other settings.
    """
    words = words or corpus.merges is None
    binary = binary_of(corpus, out, words)
    record, settings = out / "settings", f"{corpus}\n"
    if not record.exists():
        for path in output_paths(corpus, out):
            if path.exists():
                raise ValueError(f"{path} already exists and was not created by prepare; choose another folder")
        with parallel_text.writing(record) as file:
            file.write(settings)
    elif not matches_record(record, settings, fingerprints(corpus.files(), orig)):
        raise ValueError(
            f"{out} has other text or other settings (see {record}); choose another folder, or repeat the texts and "
            "options of the first call"
        )
    if binary.exists():
        return binary
    tmp = out / "tmp"
    fetch([*corpus.files()], orig, needed_files(corpus, out, words), corpus.terms)
    if not tmp.exists() and (found := fingerprints(corpus.files(), orig)):
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


def matches_record(record: Path, settings: str, found: dict[str, str]) -> bool:
    """Return whether a folder's record has these settings and fingerprints.

    Earlier versions recorded fewer fingerprints.  A text without a recorded fingerprint counts as unchanged.
    """
    text = record.read_text(encoding="utf-8")
    known = json.loads(text.removeprefix(settings) or "{}") if text.startswith(settings) else None
    return known is not None and all(known.get(path, found[path]) == found[path] for path in found)


def binary_of(corpus: Corpus, out: Path, words: bool) -> Path:
    """Return the folder of binary data.

    A corpus with subwords has a second version in words, in ``data-bin-words``.  Other data is in ``data-bin``.
    """
    return out / ("data-bin-words" if words and corpus.merges is not None else "data-bin")


def needed_files(corpus: Corpus, out: Path, words: bool) -> list[File]:
    """Return the files that are needed to make the missing results."""
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
    """Return the path of a text's tokens."""
    return tmp / f"{part}.{number}.tok.{language}"


def output_paths(corpus: Corpus, out: Path) -> Iterator[Path]:
    """Yield all paths that `prepare` may write."""
    for name in ("tmp", "code", "data-bin", "data-bin-words"):
        yield out / name
    for part in {**corpus.parts(), "valid": ()}:
        for end in (*corpus.languages, "reference"):
            yield out / f"{part}.{end}"


def tokenise(corpus: Corpus, part: str, tmp: Path, orig: Path, workers: int) -> None:
    """Tokenise each text of a part (to ``train.0.tok.en``), and join the texts of a test part (to ``test.en``)."""
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
            concatenate(outputs, tmp / f"{part}.{language}", language)


def keep_targets(corpus: Corpus, part: str, out: Path, orig: Path) -> None:
    """Write the untokenised targets of a test part.

    Raises:
        ValueError: the two sides have different numbers of lines.
    """
    reference = out / f"{part}.reference"
    if not reference.exists():
        targets = [target.place(orig) for _, target in corpus.parts()[part]]
        concatenate(targets, reference, corpus.target)
    for _ in parallel_text.read_pairs(*(out / "tmp" / f"{part}.{language}" for language in corpus.languages)):
        pass


def concatenate(paths: Iterable[Path], output: Path, language: str) -> None:
    """Write the sentences of several files to one file, one per line."""
    with parallel_text.writing(output) as file:
        for path in paths:
            file.writelines(f"{line}\n" for line in parallel_text.read_text(path, language))


def _line_function(corpus: Corpus, language: str, training: bool) -> parallel_text.Line:
    if corpus.tokenise is None:
        return lambda line: " ".join(line.split())
    return moses(language, training and corpus.normalise, **corpus.tokenise)


def moses(language: str, normalise: bool, dashes: bool = True, lowercase: bool = False) -> parallel_text.Line:
    """Return Moses' tokenizer.

    Args:
        language: language of the text.
        normalise: normalise punctuation first.
        dashes: split words at hyphens, and mark the splits with ``@-@``.
        lowercase: lowercase the tokens.
    """
    tokenizer, normalizer = MosesTokenizer(language), MosesPunctNormalizer(language)

    def tokenise(line: str) -> str:
        if normalise:
            line = normalizer.normalize(line)
        tokens = str(tokenizer.tokenize(line, aggressive_dash_splits=dashes, return_str=True))
        return tokens.lower() if lowercase else tokens

    return tokenise


def clean_and_split(corpus: Corpus, part: str, tmp: Path) -> None:
    """Clean ``part``; if the corpus has no validation texts, split the training pairs into ``train`` and ``valid``.

    Raises:
        ValueError: the cleaning leaves no pair.
    """
    outputs = {name: tuple(tmp / f"{name}.{language}" for language in corpus.languages) for name in ("train", "valid")}
    every = None if corpus.valid else corpus.valid_every
    needed = outputs if every else {"train": outputs[part]}
    if not all(path.exists() for paths in needed.values() for path in paths):
        with ExitStack() as stack:
            files = {
                name: [stack.enter_context(parallel_text.writing(path)) for path in paths]
                for name, paths in needed.items()
            }
            cleaned = bar(clean_pairs(corpus, part, tmp), desc="clean and split", unit=" pairs")
            for number, pair in enumerate(cleaned, start=1):
                name = "valid" if every and number % every == 0 else "train"
                for file, line in zip(files[name], pair, strict=True):
                    file.write(f"{line}\n")
    for paths in needed.values():
        if paths[0].stat().st_size == 0:
            texts = ", ".join(file.path for pair in corpus.parts()[part] for file in pair)
            raise ValueError(
                f"{paths[0]} is empty: too few pairs of {texts} have 1 to {corpus.max_words} words on both sides; "
                "check the texts"
            )


def clean_pairs(corpus: Corpus, part: str, tmp: Path) -> Iterator[parallel_text.Pair]:
    """Yield the pairs of a part with 1 to ``max_words`` words per side and a length ratio of at most ``max_ratio``."""
    for number in range(len(corpus.parts()[part])):
        paths = (tokens_of(tmp, part, number, language) for language in corpus.languages)
        for pair in parallel_text.read_pairs(*paths):
            short, long = sorted(len(side.split()) for side in pair)
            if short and long <= corpus.max_words and (corpus.max_ratio is None or long <= corpus.max_ratio * short):
                yield pair


def segment(corpus: Corpus, out: Path, workers: int) -> None:
    """Learn the joint BPE of the training part and apply it to all parts."""
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
    """Run ``fairseq-preprocess``; subwords get a joint dictionary, so that embeddings can be tied."""
    unfinished = binary.with_name(binary.name + ".partial")
    shutil.rmtree(unfinished, ignore_errors=True)  # fairseq-preprocess refuses to overwrite dictionaries
    tests = [str(folder / part) for part in corpus.parts() if part.startswith("test")]
    options = ["--source-lang", corpus.source, "--target-lang", corpus.target, "--destdir", unfinished]
    options += ["--trainpref", folder / "train", "--validpref", folder / "valid", "--workers", workers]
    options += ["--testpref", ",".join(tests)] if tests else []
    fairseq("preprocess", *options, *(corpus.words if words else ["--joined-dictionary"]))
    unfinished.rename(binary)
