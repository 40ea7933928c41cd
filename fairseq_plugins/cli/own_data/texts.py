"""Files of parallel text for ``own-data``: file pairs, languages and sentence pairs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from fairseq_plugins.cli import parallel_text
from fairseq_plugins.cli.catalogues import SUFFIX, language_of_catalogue, read_catalogue
from fairseq_plugins.cli.parallel_text import Pair

FilePair = tuple[Path, Path]
BOTH = (".tmx", ".tmx.gz", SUFFIX)  # formats with source and target in one file
FORMATS = {"txt", "tsv", "sgm", "xml", "tmx", "po"}  # endings of file names that are not languages


def pair_up(source: Path, target: Path, languages: tuple[str, str]) -> list[FilePair]:
    """Return the two given files, or pairs of files of two folders whose names match except for the language.

    If source and target are the same folder, every file of this folder and its subfolders contains both languages.

    Raises:
        ValueError: a path does not exist, only one side is a folder, a file has no partner, or the names of two
            files in one folder differ only in the language.
    """
    for path in (source, target):
        refuse_missing(path)
    if source.is_dir() != target.is_dir():
        raise ValueError(f"{source} and {target} are a file and a folder: give two files or two folders")
    if not source.is_dir():
        return [(source, target)]
    if source == target:
        files = _of_both_languages(source)
        if not files:
            raise ValueError(f"{source} has no files with both languages (*{', *'.join(BOTH)}): give TARGET too")
        return [(path, path) for path in files]
    sides = [_by_name(folder, language) for folder, language in zip((source, target), languages, strict=True)]
    if odd := sorted(sides[0].keys() ^ sides[1].keys()):
        raise ValueError(
            f"{(sides[0] | sides[1])[odd[0]]} has no partner in the other folder: add the partner, or remove the file"
        )
    if not sides[0]:
        raise ValueError(f"{source} has no files: give a folder with text")
    return [(sides[0][name], sides[1][name]) for name in sorted(sides[0])]


def _of_both_languages(path: Path) -> list[Path]:
    """Return files that contain both languages: a given file, or files in a given folder and its subfolders."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [file for file in files if file.name.lower().endswith(BOTH) and file.is_file()]


def _by_name(folder: Path, language: str) -> dict[str, Path]:
    """Map each file's name without the language, such as ``news.2013``, to the file, such as ``news.2013.en.gz``.

    Hidden files and all subfolders are skipped.
    """
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and not path.name.startswith("."):
            words = path.name.removesuffix(".gz").split(".")
            ends = [at for at, word in enumerate(words) if word.lower() == language.lower()]
            if ends:
                del words[ends[-1]]
            elif len(words) > 1 and words[-1].isalpha():
                del words[-1]
            other = found.setdefault(".".join(words), path)
            if other is not path:
                raise ValueError(f"{other} and {path} have the same name without the language: remove one of them")
    return found


def refuse_missing(path: Path) -> None:
    """Raise ValueError if the path does not exist."""
    if not path.exists():
        raise ValueError(f"{path} does not exist: give an existing file or folder")


def languages_of(source: Path, target: Path, source_lang: str | None, target_lang: str | None) -> tuple[str, str]:
    """Return the source and target language, from the options or from the names of the files.

    Raises:
        ValueError: a language is missing or invalid, or the two languages are equal.
    """
    of_both = _of_both_languages(source) if source == target else []
    if catalogues := [path for path in of_both if path.name.lower().endswith(SUFFIX)]:
        source_lang = source_lang or "en"  # gettext's convention
        header = language_of_catalogue(catalogues[0])
        target_lang = target_lang or header
        # A catalogue translates from msgid to msgstr, and this direction cannot be reversed.
        bases = [(language or "").partition("-")[0] for language in (header, source_lang, target_lang)]
        if bases[0] == bases[1] != bases[2]:
            raise ValueError(
                f"--source-lang {source_lang}: {catalogues[0]} contains translations to {header}, not from {header}; "
                "leave out --source-lang and --target-lang"
            )
    languages = (
        source_lang or _language_of(source, "--source-lang"),
        target_lang or _language_of(target, "--target-lang"),
    )
    for option, language in zip(("--source-lang", "--target-lang"), languages, strict=True):
        if not re.fullmatch(r"\w[\w-]*", language):
            raise ValueError(f"{option} {language}: not the name of a language; give a name such as en or pt-BR")
    if languages[0] == languages[1]:
        fix = "give two files" if source == target and not of_both else "give two languages"
        raise ValueError(f"--source-lang and --target-lang are both {languages[0]}: {fix}")
    return languages


def _language_of(path: Path, option: str) -> str:
    """Return the language in a path's name.

    ``train.de``, ``train.de.gz``, ``train.de.txt`` and a folder ``de`` have the language ``de``.  A language may have a
    region, such as ``pt-BR``.
    """
    words = path.name.removesuffix(".gz").split(".")
    if len(words) > 2 and words[-1] in FORMATS:
        words.pop()
    if not re.fullmatch("[a-z]{2,3}([-_]([A-Z]{2}|[A-Z][a-z]{3}))?", words[-1]) or words[-1] in FORMATS:
        refuse_missing(path)
        raise ValueError(f"{option}: the name {path.name} does not end in a language such as .de; give {option}")
    return words[-1]


def read_pairs(files: Sequence[FilePair], languages: tuple[str, str]) -> Iterator[Pair]:
    """Read the sentence pairs of all files.  Invalid UTF-8 becomes U+FFFD.

    Raises:
        ValueError: two files have different numbers of lines, or a file violates its format.
    """
    for source, target in files:
        if source == target and source.name.lower().endswith(SUFFIX):
            yield from read_catalogue(source)
        else:
            yield from parallel_text.read_pairs(source, target, languages=languages, errors="replace")
