"""Several target sentences of each source sentence as a tree, in which what they begin with in common is one.

The candidates of a beam search share most of their beginnings: eight of them have about a third as many different
prefixes as words.  A decoder predicts from a prefix, so it need look at each once only.

B sentences, R rows (target sentences), T target positions, M prefixes of the batch, N at most of a sentence; C width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


class PrefixTree:
    """The prefixes of a batch, those of a sentence next to each other, each behind the one that it prolongs.

    Args:
        rows: target sentences, each as the words to predict, of which the last one ends it.
        sentences: the source sentence of each row, from zero, each of which has one at least.
        first: for each source sentence the word in front of the first.
        device: where the tensors are to be.

    Attributes:
        words: the last word of each prefix, (M,).
        positions: how many words it has before that one, (M,).
        nodes: the prefix that each word of each row is predicted from, (R, T); zero beyond the row's end.
    """

    def __init__(
        self, rows: Sequence[Sequence[int]], sentences: Sequence[int], first: Sequence[int], device: torch.device
    ) -> None:
        words: list[int] = []
        positions: list[int] = []
        parents: list[int] = []
        sizes: list[int] = []
        paths: list[list[int]] = [[] for _ in rows]
        rows_of: list[list[int]] = [[] for _ in first]
        for row, sentence in enumerate(sentences):
            rows_of[sentence].append(row)
        for sentence, word_before in enumerate(first):
            root = len(words)
            words.append(word_before)
            positions.append(0)
            parents.append(-1)
            longer: dict[tuple[int, int], int] = {}
            for row in rows_of[sentence]:
                node, path = root, paths[row]
                for position, word in enumerate(rows[row][:-1], 1):
                    path.append(node)
                    parent, node = node, longer.setdefault((node, word), len(words))
                    if node == len(words):
                        words.append(word)
                        positions.append(position)
                        parents.append(parent)
                path.append(node)
            sizes.append(len(words) - root)
        self.size = len(words)
        longest = max(map(len, paths))
        self.words, self.positions = torch.tensor(words, device=device), torch.tensor(positions, device=device)
        self.nodes = torch.tensor([path + [0] * (longest - len(path)) for path in paths], device=device)
        # Where there is none, the place behind the last, whose parent is itself.
        above = [self.size if parent < 0 else parent for parent in parents]
        self._parents = torch.tensor([*above, self.size], device=device)
        place, size = torch.arange(max(sizes), device=device), torch.tensor(sizes, device=device)
        real = place < size.unsqueeze(1)
        starts = size.cumsum(0) - size
        self._places = (starts.unsqueeze(1) + place).masked_fill(~real, self.size)  # (B, N)
        self._flat = real.flatten().nonzero().squeeze(1)  # (M,)

    def windows(self, x: Tensor, width: int) -> Tensor:
        """What a causal convolution sees: the last ``width`` inputs of each prefix, zeros before the first.

        Args:
            x: (M, C).
            width: of the kernel.

        Returns:
            the inputs one after the other, (M, width·C).
        """
        places = [torch.arange(self.size, device=x.device)]
        for _ in range(width - 1):
            places.insert(0, self._parents.index_select(0, places[0]))
        return F.embedding(torch.stack(places, dim=1), _with_zeros(x)).flatten(1)

    def by_sentence(self, x: Tensor) -> Tensor:
        """(M, C) -> (B, N, C), with zeros behind the prefixes of a sentence."""
        return F.embedding(self._places, _with_zeros(x))

    def flat(self, x: Tensor) -> Tensor:
        """(B, N, C) -> (M, C)."""
        return F.embedding(self._flat, x.flatten(0, 1))

    def bias(self, dtype: torch.dtype) -> Tensor:
        """What is added to the scores of self-attention, (B, 1, N, N): each prefix sees itself and its beginnings."""
        sentences, most = self._places.shape
        starts = self._places[:, :1]
        parents = self._parents.index_select(0, self._places.flatten()).view_as(self._places)
        parents = (parents - starts).where(parents < self.size, most)  # (B, N), N where there is none
        parents = F.pad(parents, (0, 1), value=most)
        bias = torch.full((sentences, most, most + 1), float("-inf"), dtype=dtype, device=starts.device)
        seen = torch.arange(most, device=starts.device).expand(sentences, -1)
        for _ in range(self.nodes.size(1)):
            bias.scatter_(2, seen.unsqueeze(2), 0)
            seen = parents.gather(1, seen)
        return bias[:, :, :most].unsqueeze(1)


# Rows are fetched as embeddings are: the gradient of an index is much slower on a processor.
def _with_zeros(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 0, 1))
