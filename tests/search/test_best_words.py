"""The best words of each row against torch's search of the whole row."""

from __future__ import annotations

import pytest
import torch

from fairseq_plugins.search.beam_search import best_words


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
