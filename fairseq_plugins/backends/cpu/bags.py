"""Attention of the few rows of each sentence at a decoding step, whose values are added up where they lie.

B sentences, k rows for each, h heads of width v; of a sentence's S keys and values a row looks at n.

A matrix product of five rows with a sentence's values runs at an eighth of a processor's rate, and of the values of
earlier steps four fifths are of other rows' ancestors.  An embedding bag adds up words of a table by their numbers,
each times a weight: here the values that a row looks at.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_plugins.nn.attention import Sight, attention_scores
from fairseq_plugins.nn.softmax import softmax

__all__ = ["SightByBags", "bags"]


@dataclass(frozen=True)
class SightByBags(Sight):
    """What each row looks at in a step.

    Attributes:
        numbers, ends: `bags` of the values of these keys.
        places: of the keys that a row looks at, (B, 1, k, n), which need no bias; None where it looks at all of them.
    """

    numbers: Tensor
    ends: Tensor
    places: Tensor | None = None

    def weights(self, q: Tensor, keys: Tensor) -> Tensor:
        """As `Sight.weights`, of the keys that a row looks at: (B, h, k, n)."""
        if self.places is None:
            return super().weights(q, keys)
        scores = attention_scores(q, keys.narrow(3, 0, self.seen))
        return softmax(scores.gather(3, self.places.expand(-1, scores.size(1), -1, -1)))

    def average(self, weights: Tensor, values: Tensor) -> Tensor:
        """As `Sight.average`, of contiguous values."""
        each = weights.flatten().type_as(values)  # under autocast they may come in different precisions
        sums, *_ = torch.embedding_bag(
            values.flatten(0, 2), self.numbers, self.ends, per_sample_weights=each, include_last_offset=True
        )
        return sums.view(*weights.shape[:-1], -1)


def bags(places: Tensor, heads: int, size: int) -> tuple[Tensor, Tensor]:
    """What rows look at, as `torch.embedding_bag` wants it.

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
