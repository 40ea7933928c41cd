"""What options hold is read as Python would read it, or refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairseq_plugins.nn.layer_list import parse_attention, parse_convolutions
from fairseq_plugins.nn.literal import literal
from tests.fuzz.texts import DEEP, repeated, texts
from tests.fuzz.trial import Trial, fuzz


def evaluated(text: str) -> Any:
    """What Python makes of a text; only of one that was accepted, which names and calls nothing but set()."""
    return eval(text.strip(), {"__builtins__": {"set": set}})


def ordered(value: object) -> str:
    """As Python writes it, whatever the order of sets: not a number is equal to itself, and True is not 1."""
    return "".join(sorted(repr(value)))


def test_literals() -> None:
    trial = Trial(literal, ValueError)

    @fuzz
    @given(texts)
    def run(text: str) -> None:
        value = trial(text)
        if value is not None:
            assert ordered(value) == ordered(evaluated(text))

    run()


@pytest.mark.parametrize("text", ["[(512, 3)] * 10**9", "[(512, 3)] * 1000000000", "[[0] * 1000] * 1000 * 1000"])
def test_what_would_fill_the_memory(text: str) -> None:
    assert Trial(literal, ValueError)(text) is None
    assert Trial(parse_convolutions, ValueError)(text, "--encoder-layers") is None


@pytest.mark.parametrize("size", [99_000, 120_000, 10_000_000])
@pytest.mark.parametrize("deep", DEEP)
def test_long_texts(deep: str, size: int) -> None:
    """A parser that calls itself for each bracket or sign may leave its stack, and the process with it."""
    for end in ("", "1", "1]"):
        Trial(literal, ValueError)(repeated(deep, size, end))


def test_layer_lists() -> None:
    trial = Trial(parse_convolutions, ValueError)

    @fuzz
    @given(texts)
    def run(text: str) -> None:
        specs = trial(text, "--encoder-layers")
        if specs is not None:
            assert [tuple(spec) for spec in specs] == [(*layer, 1)[:3] for layer in evaluated(text)]
            assert all(spec.width > 0 and spec.kernel > 0 and spec.residual >= 0 for spec in specs)

    run()


def test_attention() -> None:
    trial = Trial(parse_attention, ValueError)

    @fuzz
    @given(texts | st.lists(st.booleans(), max_size=5).map(str), st.integers(1, 5))
    def run(text: str, layers: int) -> None:
        flags = trial(text, layers, "--decoder-attention")
        if flags is not None:
            assert any(flags)
            assert flags == ([True] * layers if evaluated(text) is True else evaluated(text))

    run()
