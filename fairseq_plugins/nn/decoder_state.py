"""Decode-time state: which row continues which, and the last inputs of causal convolutions.

A *row* is one hypothesis; a *sentence* has k of them, next to each other.  Between two steps a beam search tells each
row which earlier row it continues, and drops sentences that have finished.  fairseq announces that by an index; nothing
is moved until the next step, where the gather is one with the shift of the window.

The contract, which fairseq's searches keep: a re-order moves rows only within their sentence, and sentences stay where
they are, unless some leave: then the others may move into the gaps, all rows of a sentence together.  It is checked
where the rows are, which a look from here would stall: a GPU stops with an assertion of its own, at some later call.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Ancestry", "KeptSentences", "Past", "RowOrder", "moved", "update_state"]

_NOBODY = -1
_BROKEN = "rows may change places only within their sentence, and sentences only when others leave"

_OPERATORS = torch.library.Library("fairseq_plugins", "FRAGMENT")
_OPERATORS.define("moved(Tensor state, Tensor order) -> Tensor")
_OPERATORS.impl("moved", lambda state, order: state.index_select(0, order), "CompositeExplicitAutograd")


def moved(state: Tensor, order: Tensor) -> Tensor:
    """The rows of a state, (R, ...), in their new order, (R,): a copy, through which no gradient goes where compiled.

    A compiler must not look into it.  Where a state stays in its place in memory, torch's (2.6 to 2.9) may read
    moved rows in the loop that writes the next state there, and translate wrongly without a word.
    """
    if torch.compiler.is_compiling():
        return torch.ops.fairseq_plugins.moved(state, order)
    return state.index_select(0, order)


def update_state(state: Any, **parts: Tensor) -> None:
    """Give parts of a state their next values, which are written to their places in memory where it is ``fixed``."""
    for name, value in parts.items():
        if state.fixed:
            getattr(state, name).copy_(value)
        else:
            setattr(state, name, value)


@dataclass(frozen=True)
class KeptSentences:
    """The sentences that are left after others have finished.

    Attributes:
        sentences: of those before, in their new order, (B,).
    """

    sentences: Tensor

    def of(self, x: Tensor) -> Tensor:
        """What x, one entry for each sentence before, has for those that are left; x is overwritten.

        On the CPU only sentences with a new place are copied, within the memory of x.
        """
        if x.device.type != "cpu":  # where nobody may look at which those are
            return x.index_select(0, self.sentences)
        places, sentences = self._moves
        x.index_copy_(0, places, x.index_select(0, sentences))
        return x[: len(self.sentences)]

    @cached_property
    def _moves(self) -> tuple[Tensor, Tensor]:
        places = (self.sentences != torch.arange(len(self.sentences))).nonzero().squeeze(1)
        return places, self.sentences[places]


class RowOrder:
    """The rows of a batch, and re-orders of them that have not been carried out yet.

    Args:
        rows: number of rows at the start.
        beam: k, rows per sentence.
    """

    def __init__(self, rows: int, beam: int) -> None:
        self.rows = rows
        self.beam = beam
        self._pending: Tensor | None = None

    @property
    def left(self) -> int:
        """Rows of the next step."""
        return self.rows if self._pending is None else self._pending.numel()

    def reorder(self, new_order: Tensor) -> None:
        """Row i of the next step continues row ``new_order[i]`` of now.

        Raises:
            RuntimeError: the order breaks the contract above.
        """
        if new_order.numel() % self.beam or new_order.numel() > self.left:
            raise RuntimeError(f"cannot re-order {self.left} rows of {self.beam} per sentence to {new_order.numel()}")
        torch._assert_async(self._keeps_sentences(new_order), _BROKEN)
        self._pending = new_order if self._pending is None else self._pending.index_select(0, new_order)

    def take_pending(self) -> tuple[Tensor | None, KeptSentences | None]:
        """The composed order since the last call, and the sentences that are left; None for what has not changed.

        Returns:
            ``(rows, sentences)``: indices into the rows and the sentences of the last call.
        """
        order, self._pending = self._pending, None
        if order is None or order.numel() == self.rows:
            return order, None
        self.rows = order.numel()
        return order, KeptSentences(torch.div(order[:: self.beam], self.beam, rounding_mode="floor"))

    def _keeps_sentences(self, order: Tensor) -> Tensor:
        """Whether rows of a sentence are together, and in its place if no sentence leaves: ()."""
        sentences = torch.div(order, self.beam, rounding_mode="floor").view(-1, self.beam)
        places = sentences.narrow(1, 0, 1)
        if order.numel() == self.left:
            places = torch.arange(len(sentences), device=order.device).unsqueeze(1)
        return sentences.eq(places).all()


class Ancestry:
    """Which of its sentence's k hypotheses each row continues, at every step so far.

    With it keys and values of earlier steps never move: each step leaves k of them for a sentence, and a row looks at
    the one of its ancestor.

    Args:
        sentences: B.
        beam: k.
        capacity: steps that there is memory for.
        device: where the rows are.
        fixed: whether the state stays in its place in memory; then no row may leave.
    """

    def __init__(self, sentences: int, beam: int, capacity: int, device: torch.device, fixed: bool = False) -> None:
        self.fixed = fixed
        self.own = torch.arange(beam, device=device)
        self.table = torch.full((sentences, beam, capacity), _NOBODY, device=device)

    def step(self, order: Tensor | None, beam: int, position: Tensor) -> Tensor:
        """Begin a step.

        Args:
            order: the earlier row that each row continues, (R,); None when nothing moved.
            beam: rows that a sentence has in this step.
            position: of the step, from zero, (1,).

        Returns:
            the places of the step's keys among the k·capacity keys of a sentence, (beam,).
        """
        if order is not None:
            update_state(self, table=moved(self.table.flatten(0, 1), order).view(-1, beam, self.table.size(2)))
        own = self.own.narrow(0, 0, beam)
        self.table.index_copy_(2, position, own.view(beam, 1).expand(len(self.table), -1, 1))
        return position * len(self.own) + own

    def ancestors(self, steps: int) -> Tensor:
        """The places of each row's own keys, of so many steps, all of which have been: (B, beam, steps)."""
        beam = len(self.own)
        return self.table.narrow(2, 0, steps) + torch.arange(0, steps * beam, beam, device=self.table.device)

    def bias(self, steps: int, dtype: torch.dtype) -> Tensor:
        """What is added to a row's scores of all keys of so many steps, at least those so far, (B, 1, beam, steps·k).

        Minus infinity where there is no key yet or another row's ancestor's.
        """
        mask = self.table.narrow(2, 0, steps).unsqueeze(3) != self.own
        bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, float("-inf"))
        return bias.flatten(2).unsqueeze(1)

    def grow(self, steps: int) -> None:
        """Make room for so many more steps."""
        self.table = F.pad(self.table, (0, steps), value=_NOBODY)


class Past:
    """Keys and values of earlier steps, k of each for a step and sentence.

    Args:
        keys: of the source, as columns, (B, h, v, S), whose type, device and other sizes they have.
        places: keys that there is memory for.
    """

    def __init__(self, keys: Tensor, places: int) -> None:
        sentences, heads, width, _ = keys.shape
        # Nobody looks at a place before it is filled, but what is there is multiplied with zero.
        self.keys = keys.new_zeros(sentences, heads, width, places)
        self.values = keys.new_zeros(sentences, heads, places, width)

    def put(self, keys: Tensor, values: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Put the keys and values of a step, each (B, h, k, v), into these places, (k,).

        Returns:
            the keys of all places, as columns, (B, h, v, places), and the values, (B, h, places, v).
        """
        self.keys.index_copy_(3, places, keys.transpose(2, 3))
        self.values.index_copy_(2, places, values)
        return self.keys, self.values

    def grow(self, places: int) -> None:
        """Make room for so many more keys."""
        self.keys, self.values = F.pad(self.keys, (0, places)), F.pad(self.values, (0, 0, 0, places))

    def keep(self, kept: KeptSentences) -> None:
        """Go on with these sentences only."""
        self.keys, self.values = kept.of(self.keys), kept.of(self.values)
