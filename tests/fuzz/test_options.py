"""Options are read as Python reads literals, or are refused."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from fairseq_plugins.common.options import literal, parse_attention, parse_convolutions
from tests.fuzz.texts import DEEP, repeated, text
from tests.fuzz.trial import Trial, fuzz


def evaluated(text: str) -> Any:
    """Evaluate an accepted text, which contains no names or calls except set()."""
    return eval(text.strip(), {"__builtins__": {"set": set}})


def ordered(value: object) -> str:
    """Return a value's text without regard to the order of sets; NaN equals NaN, and True differs from 1."""
    return "".join(sorted(repr(value)))


def test_literals() -> None:
    trial = Trial(literal, ValueError)

    @fuzz
    def run(random: Random) -> None:
        option = text(random)
        value = trial(option)
        if value is not None:
            assert ordered(value) == ordered(evaluated(option))


@pytest.mark.parametrize(
    "option",
    ["[(512, 3)] * 10**9", "[(512, 3)] * 1000000000", "[[0] * 1000] * 1000 * 1000", "[[[0] * 999] * 999] * 99"],
)
def test_huge_literals_are_refused(option: str) -> None:
    assert Trial(literal, ValueError)(option) is None
    assert Trial(parse_convolutions, ValueError)(option, "--encoder-layers") is None


@pytest.mark.parametrize("size", [99_000, 120_000, 10_000_000])
@pytest.mark.parametrize("deep", DEEP)
def test_long_texts(deep: str, size: int) -> None:
    """A parser that recurses at each bracket or sign may overflow the stack and crash."""
    for end in ("", "1", "1]"):
        Trial(literal, ValueError)(repeated(deep, size, end))


def test_layer_lists() -> None:
    trial = Trial(parse_convolutions, ValueError)

    @fuzz
    def run(random: Random) -> None:
        option = text(random)
        specs = trial(option, "--encoder-layers")
        if specs is not None:
            assert [tuple(spec) for spec in specs] == [(*layer, 1)[:3] for layer in evaluated(option)]
            assert all(spec.width > 0 and spec.kernel > 0 and spec.residual >= 0 for spec in specs)


def test_attention() -> None:
    trial = Trial(parse_attention, ValueError)

    @fuzz
    def run(random: Random) -> None:
        layers = random.randint(1, 5)
        option = random.choice([text, lambda random: str(random.choices([True, False], k=layers))])(random)
        flags = trial(option, layers)
        if flags is not None:
            assert any(flags)
            assert flags == ([True] * layers if evaluated(option) is True else evaluated(option))
