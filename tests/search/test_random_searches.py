"""A few of the random searches that ``make searches`` compares with fairseq's."""

from __future__ import annotations

import pytest

from tests import searches


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_random_searches(first: int) -> None:
    found = [searches.check(number) for number in range(first, first + 20)]
    assert any(by_program for by_program, _ in found)
