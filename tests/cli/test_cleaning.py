"""Cleaning: each rule removes and counts its pairs, and training text contains no held-out sources."""

from __future__ import annotations

import gzip
import subprocess
import sys
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path

import pytest

from fairseq_plugins.cli.own_data.cleaning import OPTIONAL, RULES, clean, read_pairs, report
from fairseq_plugins.cli.parallel_text import Pair

LANGUAGES = ("en", "de")
HELD_OUT = [("Held out.", "Zurückgehalten."), ("Kept back.", "Zurückgehalten.")]
GOOD = [(f"Sentence {n}.", f"Satz {n}.") for n in range(3000)]

# The pairs that each rule removes if `GOOD[0]` comes before them and `HELD_OUT` is the test part.
BAD: dict[str, list[Pair]] = {
    "broken": [("A \ufffd.", "Ein A."), ("An A.", "Ein \ufffd.")],
    "empty": [("", "Leer."), ("Empty.", " \u3000\t")],
    "copies": [("OK", " OK ")],
    "long": [("x" * 2001, "y" * 2000), ("y" * 400, "x" * 2001)],
    "ratio": [("word " * 20, "Wort."), ("Word.", "Wort " * 20)],
    "duplicates": [GOOD[0], ("Sentence  0. ", "Satz 0.")],
    "sources": [("Sentence 0.", "Null.")],
    "held-out": [(" Held  out. ", "Zurückgehalten."), ("Kept back.", "Anders.")],
}


def lines(folder: Path, part: str) -> list[Pair]:
    sides = [(folder / f"{part}.{language}").read_text(encoding="utf-8").split("\n") for language in LANGUAGES]
    assert [side.pop() for side in sides] == ["", ""]
    return list(zip(*sides, strict=True))


def cleaned(
    folder: Path, train: Iterable[Pair], keep: Iterable[str] = (), **parts: list[Pair]
) -> tuple[Mapping[str, int], dict[str, list[Pair]]]:
    figures = clean({"train": train, **parts}, LANGUAGES, folder, set(keep))
    written = {part: lines(folder, part) for part in ("train", "valid", "test") if (folder / f"{part}.en").exists()}
    assert {part: figures[part] for part in written} == {part: len(pairs) for part, pairs in written.items()}
    return figures, written


def test_each_rule_removes_and_counts_its_pairs(tmp_path: Path) -> None:
    assert set(BAD) == set(RULES)
    near = [("x" * 2000, "y" * 2000), ("y" * 49, "x"), ("y" * 9 * 6, "x" * 6), ("OK", "ok")]  # within the limits
    valid = [("To validate.", "Zu prüfen."), ("", "Leer."), ("USB", "USB")]
    bad = [pair for pairs in BAD.values() for pair in pairs]
    figures, written = cleaned(tmp_path, iter([*GOOD, *near, *bad]), valid=valid, test=HELD_OUT)
    assert {rule: figures[rule] for rule in RULES} == {rule: len(pairs) for rule, pairs in BAD.items()}
    assert written == {"train": [*GOOD, *near], "valid": [valid[0], valid[2]], "test": HELD_OUT}
    told = report(figures)
    assert [rule for rule in RULES if RULES[rule] not in told] == []
    assert [rule for rule in RULES if f"--keep {rule} " in told] == [rule for rule in RULES if rule in OPTIONAL]


@pytest.mark.parametrize("rule", OPTIONAL)
def test_a_rule_may_be_switched_off(rule: str, tmp_path: Path) -> None:
    figures, written = cleaned(tmp_path, [*GOOD, *BAD[rule]], {rule, "sources"}, valid=[("Other.", "Anderes.")])
    assert written["train"] == [*GOOD, *BAD[rule]]
    assert not any(figures.get(rule) for rule in RULES)


@pytest.mark.parametrize("keep", [(), ("duplicates",), ("duplicates", "sources")])
def test_held_out_sources_are_not_trained_on(keep: tuple[str, ...], tmp_path: Path) -> None:
    """The text has 299 lines three times each, and once more with another translation."""
    pairs = [*GOOD[:299] * 3, *((source, f"{target}!") for source, target in GOOD[:299])]
    given = {"valid": [(f" {GOOD[5][0]}", "Fünf.")], "test": [GOOD[7]]}
    for parts, held_out in (({}, 119 if keep else 29), (given, 2)):
        _, written = cleaned(tmp_path, pairs, keep, **parts)
        sources = {part: {" ".join(source.split()) for source, _ in pairs} for part, pairs in written.items()}
        left = sources.pop("train")
        for part, others in sources.items():
            assert not left & others, part
        assert sum(map(len, sources.values())) == 299 - len(left)
        assert len(left) >= 299 - held_out


def test_validation_is_counted_after_cleaning(tmp_path: Path) -> None:
    """A tenth of a small text, at least 200 pairs, a hundredth, and at most about 3000 are held out, evenly spaced."""
    for good, held_out in ((290, 29), (2999, 200 + 14), (60_000, 600), (400_000, 3000 + 7)):
        pairs = [(f"Sentence {n // 2}.", f"Satz {n // 2}.") for n in range(2 * good)]
        figures, written = cleaned(tmp_path, pairs)
        assert figures["valid"] == held_out, good
        assert figures["train"] + figures["valid"] == figures["duplicates"] == good
        numbers = [int(source[9:-1]) for source, _ in written["valid"]]
        assert len({b - a for a, b in pairwise(numbers)}) == 1
        assert numbers[0] + good - numbers[-1] < 2 * (numbers[1] - numbers[0]) + 1
        assert ("is unreliable" in report(figures)) == (good == 290)


def test_broken_encodings(tmp_path: Path) -> None:
    """Lines with invalid UTF-8 are counted; a file in another encoding is refused."""
    english_file, german_file = files = tmp_path / "a.en", tmp_path / "a.de"
    english_file.write_text("".join(f"{source}\n" for source, _ in GOOD), encoding="utf-8")
    german = [f"Für {n}." for n in range(3000)]
    german[3] = "Zeichen \ufffd."
    german_file.write_bytes("\n".join(german).encode().replace("ü".encode(), b"\xfc", 40))
    figures, written = cleaned(tmp_path, read_pairs([files], LANGUAGES))
    assert figures["broken"] == 41
    assert len(written["train"]) + len(written["valid"]) == 2959
    german_file.write_text("\n".join(german), encoding="latin-1", errors="replace")
    with pytest.raises(ValueError, match="2999 of 3000"):
        cleaned(tmp_path, read_pairs([files], LANGUAGES))
    for content in ("Text.\n".encode("utf-16"), gzip.compress(b"Text.\n")):
        english_file.write_bytes(content)
        with pytest.raises(ValueError, match=r"a\.en is gzipped or in UTF-16"):
            list(read_pairs([files], LANGUAGES))
    broken = BAD["broken"][0]
    for part in ("valid", "test"):
        cleaned(tmp_path, GOOD, **{part: [*GOOD[:190], *[broken] * 10]})
        for good, bad in ((189, 11), (1, 2)):
            with pytest.raises(ValueError, match=f"--{part}: .* in {bad} of {good + bad}"):
                cleaned(tmp_path, GOOD, **{part: [*GOOD[:good], *[broken] * bad]})


def test_the_rules_that_removed_a_whole_text_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"after cleaning: 0.*\n  removed 2: .*characters \(--keep long"):
        cleaned(tmp_path, BAD["long"])


@pytest.mark.slow
def test_memory_is_that_of_keys_alone(tmp_path: Path) -> None:
    """A million pairs of 1000 characters need 100 bytes of memory each."""
    program = (
        "import sys; from pathlib import Path; from resource import *\n"
        "from fairseq_plugins.cli.own_data.cleaning import clean\n"
        "for number in (1000, 1_000_000):\n"
        "    pairs = ((f'{n} ' + 'x' * 500, f'{n} ' + 'y' * 500) for n in range(number))\n"
        "    clean({'train': pairs}, ('en', 'de'), Path(sys.argv[1]))\n"
        "    print(getrusage(RUSAGE_SELF).ru_maxrss)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    few, many = map(int, subprocess.run(command, capture_output=True, check=True).stdout.split())
    assert many - few < 100_000  # KiB
