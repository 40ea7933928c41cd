"""`best_words`, compared with `torch.topk`."""

from __future__ import annotations

import pytest
import torch

from fairseq_plugins.search.beam_search import best_words


@pytest.mark.parametrize("count", [1, 2, 10])
@pytest.mark.parametrize("size", [11, 64, 640, 1280, 1281, 1343, 1344, 5000])
def test_equals_topk(count: int, size: int) -> None:
    """Sizes have a remainder or none; the best words are in one block, in the remainder, or have minus infinity."""
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
