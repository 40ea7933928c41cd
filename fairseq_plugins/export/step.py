"""What makes a decoding step, as operators.

B sentences, k hypotheses (rows) for each, R = B·k; h heads of width v, P places of earlier keys.

What a step is given of the source has one entry for each sentence and never changes.  Rows of a state are re-ordered at
the start of the step; keys and values of earlier steps never move, and the caller says by a bias which a row looks at.
"""

from __future__ import annotations

import numpy as np

from fairseq_plugins.export.program import Program, Weights

__all__ = ["Sizes", "StepProgram"]

Sizes = list[str | int]  # of a tensor


class StepProgram(Program):
    """The program of a decoding step.

    Args:
        weights: as of `Program`.
        sources: sizes of what it is given of the source, last of what is added to attention for it to be to words.

    Attributes:
        states: widths of those that are re-ordered, by their names.
    """

    def __init__(self, weights: Weights, sources: list[Sizes]) -> None:
        super().__init__(weights)
        self.tokens = self.input("tokens", np.int64, ["R"])
        self.position = self.input("position", np.int64, [1])
        given = [self.input(f"source{n}", np.float32, sizes) for n, sizes in enumerate(sources)]
        *self.sources, self.only_words = given
        self.shape = self.Concat(self.columns(self.Shape(self.sources[0]), 0, 1), [-1], axis=0)  # (B, k)
        self.states: dict[str, int] = {}
        self._attending = 0  # layers so far that attend to earlier steps
        self._order = ""
        self._past_bias = ""

    def state(self, width: int) -> str:
        """Another state, (before, width), in the order of the step before, to be `reordered`."""
        if not self.states:
            self._order = self.input("order", np.int64, ["R"])
        name = self.input(f"state{len(self.states)}", np.float32, ["before", width])
        self.states[name] = width
        return name

    def reordered(self, state: str) -> str:
        """(before, width) -> (R, width)."""
        return self.Gather(state, self._order, axis=0)

    def keep(self, state: str, after: str) -> None:
        """What a state is after the step, (R, width)."""
        self.output(state.replace("state", "next"), after, np.float32, ["R", self.states[state]])

    def attend_to_past(self, q: str, keys_values: str, heads: int, width: int) -> str:
        """Attend to the keys and values of earlier steps and of this one, (R, 2·h·v): (B, h, k, v) -> (B, h, k, v)."""
        n = self._attending
        if not n:
            self._past_bias = self.input("past", np.float32, ["B", 1, "k", "P"])
        self._attending += 1
        past_keys = self.input(f"keys{n}", np.float32, ["B", heads, width, "P"])
        past_values = self.input(f"values{n}", np.float32, ["B", heads, "P", width])
        self.output(f"new{n}", keys_values, np.float32, ["R", 2 * heads * width])
        key, value = (self.heads(part, heads, width) for part in self.chunks(keys_values, 2, axis=1))
        own = self.ReduceSum(self.Mul(q, key), [3], keepdims=1)
        scores = self.Concat(self.Add(self.MatMul(q, past_keys), self._past_bias), own, axis=3)
        a = self.Softmax(scores, axis=3)
        old = self.MatMul(self.columns(a, 0, -1), past_values)
        return self.Add(old, self.Mul(self.columns(a, -1, np.iinfo(np.int64).max), value))
