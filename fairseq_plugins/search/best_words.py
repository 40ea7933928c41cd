"""The few best words of each hypothesis, in one pass over all of them.

R rows (hypotheses), V target words.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 64


def best_words(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The best of each row, as `torch.topk`: (R, V) to scores and words, (R, count) each.

    On the CPU the best of each block of words is found first, by a pass that is as fast as memory; only the words of
    the best ``count`` blocks can be among the best ``count``.
    """
    size = scores.size(1)
    blocks = size // _BLOCK
    if scores.device.type != "cpu" or blocks <= 2 * count:
        return scores.topk(count)
    whole = scores[:, : blocks * _BLOCK].unflatten(1, (blocks, _BLOCK))
    kept = whole.amax(dim=2).topk(count, sorted=False)[1].unsqueeze(2)
    words = (kept * _BLOCK + torch.arange(_BLOCK)).flatten(1)
    rest = torch.arange(blocks * _BLOCK, size).expand(len(scores), -1)
    words = torch.cat([words, rest], dim=1)
    best, at = scores.gather(1, words).topk(count)
    return best, words.gather(1, at)
