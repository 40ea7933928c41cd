"""Attention in several heads, at a decoding step: the few rows of each sentence as queries.

B sentences, k rows for each, h heads of width v; of a sentence's S keys and values a row looks at n.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_plugins.nn.attention import attention_weights

__all__ = ["Sight", "attend_step", "bags"]


@dataclass(frozen=True)
class Sight:
    """What each row looks at in a step.

    Attributes:
        seen: how many of the keys, from the first on, any row looks at.
        bias: added to the scores, broadcast to (B, h, k, n); None for nothing.
        places: of the keys that a row looks at, (B, 1, k, n), which need bags; None where they are all that are seen.
        bags: `bags` of the values of these keys; None where averages are matrix products.
    """

    seen: int
    bias: Tensor | None = None
    places: Tensor | None = None
    bags: tuple[Tensor, Tensor] | None = None

    def weights(self, q: Tensor, keys: Tensor) -> Tensor:
        """The weights that `attend_step` averages with, (B, h, k, n)."""
        return attention_weights(q, keys.narrow(3, 0, self.seen), self.bias, self.places)


def bags(places: Tensor, heads: int, size: int) -> tuple[Tensor, Tensor]:
    """What rows look at, as `torch.embedding_bag` wants it; on the CPU.

    Args:
        places: of the values that a row looks at, (B, k, n).
        heads: h.
        size: S.

    Returns:
        the numbers of these values among all B·h·S, (B·h·k·n,), and where those of each row begin and the last end,
        (B·h·k + 1,).
    """
    sentences, rows, looks = places.shape
    first = torch.arange(sentences * heads).mul_(size).view(sentences, heads, 1, 1)
    ends = torch.arange(sentences * heads * rows + 1).mul_(looks)
    return (first + places.unsqueeze(1)).flatten(), ends


def attend_step(q: Tensor, keys: Tensor, values: Tensor, sight: Sight, dropout: Callable[[Tensor], Tensor]) -> Tensor:
    """Weighted averages of ``values``, (B, h, k, v); for few rows torch's fused kernel is slower.

    With bags the values that a row looks at are added up where they lie, as an embedding bag adds up words: without
    those that only other rows look at, and in less time than a matrix product of so few rows.

    Args:
        q: (B, h, k, v).
        keys: as columns, (B, h, v, S): with so few rows against them, products with rows take six times as long.
        values: (B, h, S, v), contiguous.
        sight: which of them.
        dropout: of the weights.
    """
    weights = dropout(sight.weights(q, keys))
    if sight.bags is None:
        return weights @ values.narrow(2, 0, sight.seen)
    numbers, ends = sight.bags
    each = weights.flatten().type_as(values)  # under autocast they may come in different precisions
    sums, *_ = torch.embedding_bag(
        values.flatten(0, 2), numbers, ends, per_sample_weights=each, include_last_offset=True
    )
    return sums.view(*weights.shape[:-1], -1)
