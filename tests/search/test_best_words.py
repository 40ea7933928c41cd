"""The best words of each row against torch's search of the whole row."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fairseq_plugins.search.beam_search import best_words
from tests.operators import Operators


@pytest.mark.parametrize("count", [1, 2, 10])
@pytest.mark.parametrize("size", [11, 64, 640, 1280, 1281, 1343, 1344, 5000])
def test_equals_topk(count: int, size: int) -> None:
    """With whole blocks of words alone and with a rest, the best anywhere: in one block, in the rest, impossible."""
    torch.manual_seed(size)
    scores = torch.randn(7, size)
    scores[1, -10:] += 10
    scores[2, :10] += 10
    scores[3] = scores[3].sort()[0]
    scores[4, 1:] = -torch.inf
    scores[5] -= 100
    best, words = best_words(scores, count)
    assert torch.equal(best, scores.topk(count)[0])
    assert torch.equal(best, scores.gather(1, words))
    assert all(len(set(row)) == count for row in words.tolist())


@pytest.mark.parametrize(("device", "size", "searches"), [("cpu", 5000, 2), ("cuda", 5000, 1), ("cpu", 500, 1)])
def test_where_blocks_are_searched_first(device: str, size: int, searches: int) -> None:
    """On a processor, where there are more blocks than best words; a GPU, here a pretended one, searches the row."""
    with FakeTensorMode(), Operators() as operators:
        best_words(torch.empty(3, size, device=device), 10)
    assert operators.count("aten.topk") == searches
