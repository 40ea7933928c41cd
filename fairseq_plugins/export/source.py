"""What reads a source, as operators.

B sentences, padded on the right to S words, N = B·S.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from fairseq_plugins.export.program import Program, Weights

__all__ = ["SourceProgram"]


class SourceProgram(Program):
    """The program that reads the source, up to what steps need of it.

    Args:
        weights: as of `Program`.
        pad: the padding symbol.
        eos: the end of a sentence.
    """

    def __init__(self, weights: Weights, pad: int, eos: int) -> None:
        super().__init__(weights)
        self.words = self.input("words", np.int64, ["B", "S"])
        is_token = self.Not(self.Equal(self.words, pad))  # (B, S)
        self.shape = self.Shape(self.words)
        _, self.length = self.chunks(self.shape, 2, axis=0)
        self.mask = self.Unsqueeze(self.Cast(is_token, to=TensorProto.FLOAT), [2])  # (B, S, 1)
        self.lengths = self.ReduceSum(self.Cast(is_token, to=TensorProto.INT32), [1], keepdims=0)  # (B,), for LSTMs
        self.bias = self._bias(is_token)  # added to scores of attention, (B, 1, S)
        self.only_words = self._bias(self.And(is_token, self.Not(self.Equal(self.words, eos))))

    def _bias(self, seen: str) -> str:
        return self.Unsqueeze(self.Where(seen, 0.0, -np.inf), [1])

    def flat(self, x: str, width: int) -> str:
        """(B, S, width) -> (N, width)."""
        return self.Reshape(x, [-1, width])

    def transposed(self, x: str) -> str:
        """(B, S, width) -> (B, width, S), or back."""
        return self.Transpose(x, perm=[0, 2, 1])

    def windows(self, x: str, width: int, padding: tuple[int, int]) -> str:
        """Each input beside its neighbours, zeros outside the sentence: (N, width) -> (N, w·width)."""
        x = self.Mul(self.by_sentence(x, width), self.mask)
        if sum(padding):
            before, after = padding
            x = self.Pad(x, [0, before, 0, 0, after, 0])
            shifted = [self.Slice(x, [start], self.Add(self.length, [start]), [1]) for start in range(1 + sum(padding))]
            x = self.Concat(*shifted, axis=2)
        return self.flat(x, width * (1 + sum(padding)))
