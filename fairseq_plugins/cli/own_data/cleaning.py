"""Cleaning of parallel text.

The first pass writes all usable pairs to a file, and keeps a hash of 8 bytes in memory for each source and each pair.
The second pass writes the pairs that are neither repeated nor held out.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from fairseq_plugins.cli.bar import bar
from fairseq_plugins.cli.parallel_text import Pair, writing

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
        ValueError: too many lines are invalid UTF-8, or a part has too few pairs.
    """
    numbers = Counter(train=0, valid=0, test=0)
    held_out = array("q")  # keys of sources
    for part in ("valid", "test"):
        if part in parts:
            with _writing(folder, part, languages) as write:
                for pair in parts[part]:
                    if part == "test" or broken_rule(pair, set(OPTIONAL)) is None:
                        held_out.append(key(pair[0]))
                        write(pair)
                        numbers[part] += 1
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
        raise ValueError(
            f"training pairs left after cleaning: {numbers['train']}, at least {LEAST} are needed; give more text"
        )
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
    found = len(of_source) + sum(numbers[rule] for rule in RULES)
    if numbers["broken"] > MOST_BROKEN * found:
        raise ValueError(
            f"invalid UTF-8 in {numbers['broken']} of {found} pairs; convert the text, for example with iconv"
        )
    return np.array(of_source, dtype=np.int64), np.array(of_pair, dtype=np.int64)


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
    lines = [f"{numbers['train']} training pairs, {numbers['valid']} validation pairs."]
    for rule, meaning in RULES.items():
        if number := numbers.get(rule, 0):
            option = f" (--keep {rule} keeps them)" if rule in OPTIONAL else ""
            lines.append(f"  removed {number}: {meaning}{option}")
    if numbers["valid"] < FEW:
        lines.append(f"Validation on {numbers['valid']} pairs is unreliable: {FEW} or more are better.")
    return "\n".join(lines)
