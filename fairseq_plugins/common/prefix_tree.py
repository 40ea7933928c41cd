"""A prefix tree of several target sentences per source sentence.

A prefix consists of the words before a predicted word.  The hypotheses of a beam search share most of their prefixes.
In a set of eight hypotheses, the number of distinct prefixes is about a third of the number of words.  A decoder needs
to compute each distinct prefix only once.

B sentences, R rows (target sentences), T target positions, M distinct prefixes in the batch, N maximum number of
prefixes per sentence, C width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


class PrefixTree:
    """The distinct prefixes of a batch.

    Prefixes are grouped by sentence.  The parent of a prefix is the prefix without the last word.  A parent precedes
    its children.

    Args:
        rows: target sentences, each a sequence of words to predict, including the end of the sentence.
        sentences: index of each row's source sentence; each source sentence has at least one row.
        first: word before the first target word, for each source sentence.

    Attributes:
        words: last word of each prefix, (M,).
        positions: number of words before the last word of each prefix, (M,).
        nodes: index of the prefix that predicts each word of each row, (R, T); zero after the end of a row.
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
        # The parent of each root is a dummy prefix with index M.  The parent of the dummy prefix is the dummy itself.
        above = [self.size if parent < 0 else parent for parent in parents]
        self._parents = torch.tensor([*above, self.size], device=device)
        place, size = torch.arange(max(sizes), device=device), torch.tensor(sizes, device=device)
        real = place < size.unsqueeze(1)
        starts = size.cumsum(0) - size
        self._places = (starts.unsqueeze(1) + place).masked_fill(~real, self.size)  # (B, N)
        self._flat = real.flatten().nonzero().squeeze(1)  # (M,)

    def windows(self, x: Tensor, width: int) -> Tensor:
        """Return the input window of a causal convolution at each prefix, (M, C) -> (M, width·C).

        A window concatenates the inputs of the prefix's last ``width`` words, with zeros before the first word.
        """
        places = [torch.arange(self.size, device=x.device)]
        for _ in range(width - 1):
            places.insert(0, self._parents.index_select(0, places[0]))
        return F.embedding(torch.stack(places, dim=1), _with_zeros(x)).flatten(1)

    def by_sentence(self, x: Tensor) -> Tensor:
        """Group values of prefixes by sentence, padded with zeros, (M, C) -> (B, N, C)."""
        return F.embedding(self._places, _with_zeros(x))

    def flat(self, x: Tensor) -> Tensor:
        """Undo `by_sentence`, (B, N, C) -> (M, C)."""
        return F.embedding(self._flat, x.flatten(0, 1))

    def bias(self, dtype: torch.dtype) -> Tensor:
        """Return the bias of self-attention scores, (B, 1, N, N): a prefix attends to itself and its ancestors."""
        sentences, most = self._places.shape
        starts = self._places[:, :1]
        parents = self._parents.index_select(0, self._places.flatten()).view_as(self._places)
        parents = (parents - starts).where(parents < self.size, most)  # (B, N); roots have the parent N
        parents = F.pad(parents, (0, 1), value=most)
        bias = torch.full((sentences, most, most + 1), float("-inf"), dtype=dtype, device=starts.device)
        seen = torch.arange(most, device=starts.device).expand(sentences, -1)
        for _ in range(self.nodes.size(1)):
            bias.scatter_(2, seen.unsqueeze(2), 0)
            seen = parents.gather(1, seen)
        return bias[:, :, :most].unsqueeze(1)


def _with_zeros(x: Tensor) -> Tensor:
    """Append a row of zeros for `F.embedding`, whose gradient is computed faster than the gradient of indexing."""
    return F.pad(x, (0, 0, 0, 1))
