"""The text of ``own-data``, from the user's files to clean sentence pairs.

Names of files determine the languages, and which files of two folders form a pair.  The first pass of the cleaning
writes all usable pairs to a file, and keeps a hash of 8 bytes in memory for each source and each pair.  The second pass
writes the pairs that are neither repeated nor held out.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from fairseq_plugins.cli import parallel_text
from fairseq_plugins.cli.catalogues import SUFFIX, entries_of, language_of, load
from fairseq_plugins.cli.parallel_text import Pair, bar, writing
from fairseq_plugins.common.files import refuse_pipe

FilePair = tuple[Path, Path]
BOTH = (".tmx", ".tmx.gz", SUFFIX)  # formats with source and target in one file
FORMATS = {"txt", "tsv", "sgm", "xml", "tmx", "po"}  # endings of file names that are not languages
LONGEST = 2000  # maximum number of characters in each side of a pair
RATIO = 9  # maximum ratio of the two sides' lengths in characters
# Sides of at most SHORT characters may differ in length by any ratio, because a translation of "OK" may be long.
SHORT = 50
FEW = 200  # scores on fewer held-out pairs are unreliable
LEAST = 20  # minimum number of training pairs
MOST_BROKEN = 0.05  # maximum share of pairs with invalid UTF-8; a larger share suggests another encoding

# Cleaning rules in the order in which they are applied. --keep switches off rules in `OPTIONAL`.
RULES = {
    "broken": "invalid UTF-8 or U+FFFD",
    "empty": "an empty side",
    "copies": "two equal sides",
    "long": f"a side of more than {LONGEST} characters",
    "ratio": f"a side more than {RATIO} times as long as the other",
    "duplicates": "a repeated pair",
    "sources": "a repeated source with another translation",
    "held-out": "a source that is also in the validation or test part",
}
OPTIONAL = ("copies", "long", "ratio", "duplicates", "sources")

Array = np.ndarray[tuple[int], np.dtype[np.int64]]
Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]


def pair_up(source: Path, target: Path, languages: tuple[str, str]) -> list[FilePair]:
    """Return the two given files, or pairs of files of two folders whose names match except for the language.

    If source and target are the same folder, every file of this folder and its subfolders contains both languages.
    """
    for path in (source, target):
        refuse_missing(path)
    if source.is_dir() != target.is_dir():
        raise ValueError(f"{source} and {target} are a file and a folder: give two files or two folders")
    if not source.is_dir():
        for path in (source, target):
            refuse_pipe(path)
        if not source.samefile(target):
            return [(source, target)]
        if not _of_both_languages(source):
            raise ValueError(f"{source} has one language: give SOURCE and TARGET, or one file (*{', *'.join(BOTH)})")
        return [(source, source)]
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
    """Return the source and target language, from the options or from the names of the files."""
    of_both = _of_both_languages(source) if source == target else []
    if catalogues := [path for path in of_both if path.name.lower().endswith(SUFFIX)]:
        source_lang = source_lang or "en"  # gettext's convention
        header = language_of(load(catalogues[0]))
        target_lang = target_lang or header
        # A catalogue translates from msgid to msgstr, and this direction cannot be reversed.
        bases = [_base(language or "") for language in (header, source_lang, target_lang)]
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
        ValueError: a file cannot be read, or a catalogue's header names another language than the target language.
    """
    for source, target in files:
        if source == target and source.name.lower().endswith(SUFFIX):
            catalogue = load(source)
            pairs = list(entries_of(catalogue))
            header = language_of(catalogue)
            if pairs and header and _base(header) != _base(languages[1]):
                raise ValueError(
                    f"{source}: the header names the language {header}, not {languages[1]}; leave out the file, "
                    "correct its header, or give another --target-lang"
                )
            yield from pairs
        else:
            yield from parallel_text.read_pairs(source, target, languages=languages, errors="replace")


def _base(language: str) -> str:
    """Return a language without its region or script."""
    return re.split("[-_@.]", language)[0].lower()


def broken_rule(pair: Pair, keep: Set[str]) -> str | None:
    """Return the first cleaning rule that a pair breaks, or None; rules that compare several pairs are not checked."""
    short, long = sorted(map(len, pair))
    if "\ufffd" in pair[0] or "\ufffd" in pair[1]:
        return "broken"
    if not pair[0].strip() or not pair[1].strip():
        return "empty"
    if "copies" not in keep and pair[0].strip() == pair[1].strip():
        return "copies"
    if "long" not in keep and long > LONGEST:
        return "long"
    if "ratio" not in keep and long > max(SHORT, RATIO * short):
        return "ratio"
    return None


def key(*texts: str) -> int:
    """Return a 64-bit hash of the texts' words.  The hash is valid only in this process."""
    return hash(tuple(tuple(text.split()) for text in texts))


def clean(
    parts: Mapping[str, Iterable[Pair]], languages: tuple[str, str], folder: Path, keep: Set[str] = frozenset()
) -> dict[str, int]:
    """Clean the pairs, and write one line per pair to the files of ``train``, ``valid`` and, if given, ``test``.

    A test part keeps all its pairs.  A validation part loses only pairs with invalid UTF-8 or an empty side.  Without a
    validation part, evenly spaced training pairs are held out after cleaning.  About 1 % of the training pairs are held
    out, but at least 200, at most about 3000, and never more than a tenth.

    Args:
        parts: pairs of ``train``, and optionally of ``valid`` and ``test``.
        languages: source and target language.
        folder: output folder.
        keep: cleaning rules in `OPTIONAL`; pairs that break only these rules are kept.

    Returns:
        number of pairs in each part, and number of training pairs that each rule removed.

    Raises:
        ValueError: a part has no usable pairs, too few, or too many with invalid UTF-8.
    """
    numbers = Counter(train=0, valid=0, test=0)
    held_out = array("q")  # keys of sources
    for part in ("valid", "test"):
        if part in parts:
            with _writing(folder, part, languages) as write:
                found: Counter[str | None] = Counter()
                for pair in parts[part]:
                    rule = broken_rule(pair, set(OPTIONAL))
                    found[rule] += 1
                    if part == "test" or rule is None:
                        held_out.append(key(pair[0]))
                        write(pair)
                        numbers[part] += 1
            _refuse_other_encoding(found["broken"], found.total(), f"--{part}: ")
            if not numbers[part]:
                raise ValueError(f"--{part}: the text has no usable pairs; give another text")
    of_source, of_pair = _write_usable_pairs(parts["train"], languages, folder, keep, numbers)
    train = np.ones(len(of_source), dtype=np.bool_)
    for rule, dropped in (
        ("duplicates", ~_first(of_pair)),
        ("sources", ~_first(of_source)),
        ("held-out", np.isin(of_source, np.array(held_out, dtype=np.int64))),
    ):
        if rule not in keep:
            numbers[rule] = int((train & dropped).sum())
            train &= ~dropped
    masks = {"train": train}
    if "valid" not in parts:
        masks["valid"] = valid = _evenly(train)
        # With --keep sources, several pairs may have the same source.  If a source is held out for validation, its
        # other pairs are removed from the training part.
        same_source = np.isin(of_source, of_source[valid])
        numbers["held-out"] += int((train & same_source & ~valid).sum())
        train &= ~same_source
    for language in languages:
        usable = folder / f"usable.{language}"
        for part, mask in masks.items():
            with usable.open(encoding="utf-8", newline="\n") as lines, writing(folder / f"{part}.{language}") as file:
                file.writelines(line for line, is_of_part in zip(lines, mask, strict=True) if is_of_part)
            numbers[part] = int(mask.sum())
        usable.unlink()
    if numbers["train"] < LEAST:
        left = f"training pairs left after cleaning: {numbers['train']}, at least {LEAST} are needed; give more text"
        raise ValueError("\n".join([left, *_removed(numbers)]))
    return dict(numbers)


def _write_usable_pairs(
    pairs: Iterable[Pair], languages: tuple[str, str], folder: Path, keep: Set[str], numbers: Counter[str]
) -> tuple[Array, Array]:
    """Write the pairs for which `broken_rule` returns None.

    Returns:
        hashes of the written sources, and hashes of the written pairs, computed by `key`.
    """
    of_source, of_pair = array("q"), array("q")
    with _writing(folder, "usable", languages) as write:
        for pair in bar(pairs, desc="read and clean", unit=" pairs"):
            if rule := broken_rule(pair, keep):
                numbers[rule] += 1
            else:
                of_source.append(key(pair[0]))
                of_pair.append(key(*pair))
                write(pair)
    _refuse_other_encoding(numbers["broken"], len(of_source) + sum(numbers[rule] for rule in RULES))
    return np.array(of_source, dtype=np.int64), np.array(of_pair, dtype=np.int64)


def _refuse_other_encoding(broken: int, found: int, part: str = "") -> None:
    if broken > MOST_BROKEN * max(found, FEW) or broken > found / 2:
        raise ValueError(
            f"{part}invalid UTF-8 or U+FFFD in {broken} of {found} pairs; convert the text, for example with iconv"
        )


@contextmanager
def _writing(folder: Path, part: str, languages: tuple[str, str]) -> Iterator[Callable[[Pair], None]]:
    """Open the two files of a part, and yield a function that writes a pair."""
    source, target = languages
    with writing(folder / f"{part}.{source}") as sources, writing(folder / f"{part}.{target}") as targets:

        def write(pair: Pair) -> None:
            sources.write(pair[0] + "\n")
            targets.write(pair[1] + "\n")

        yield write


def _evenly(pairs: Mask) -> Mask:
    """Return a mask that selects evenly spaced pairs for validation."""
    chosen = np.zeros_like(pairs)
    number = int(pairs.sum())
    if number >= LEAST:
        every = number // min(max(number // 100, FEW), 3000, number // 10)
        chosen[np.flatnonzero(pairs)[every - 1 :: every]] = True
    return chosen


def _first(keys: Array) -> Mask:
    """Return a mask that selects the first occurrence of each key."""
    first = np.zeros(len(keys), dtype=np.bool_)
    first[np.unique(keys, return_index=True)[1]] = True
    return first


def report(numbers: Mapping[str, int]) -> str:
    """Return a summary with one line per rule that removed pairs."""
    lines = [f"{numbers['train']} training pairs, {numbers['valid']} validation pairs.", *_removed(numbers)]
    if numbers["valid"] < FEW:
        lines.append(f"Validation on {numbers['valid']} pairs is unreliable: {FEW} or more are better.")
    return "\n".join(lines)


def _removed(numbers: Mapping[str, int]) -> list[str]:
    """Return a line for each rule that removed pairs."""
    options = {rule: f" (--keep {rule} keeps them)" for rule in OPTIONAL}
    return [
        f"  removed {numbers[rule]}: {meaning}{options.get(rule, '')}"
        for rule, meaning in RULES.items()
        if numbers.get(rule)
    ]
