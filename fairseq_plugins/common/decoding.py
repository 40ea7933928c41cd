"""Decode-time state: one object per batch that computes the steps, and the order of its rows.

B sentences, k hypotheses (rows) per sentence, R = B·k rows, T target positions, S source positions, V vocabulary.

A *row* is one hypothesis.  The k rows of a sentence are adjacent.  Between two steps a beam search assigns to each row
the previous row that it continues, and drops finished sentences.  fairseq passes an index for this; rows move in the
next step only, which gathers rows and shifts windows in one copy.

The contract, which fairseq's searches respect: rows move only within their sentence, and sentences keep their
places.  If sentences are dropped, others may fill the gaps, with all their rows together.  The device checks this
without
synchronisation: on a GPU a violation raises an assertion at a later call.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from fairseq_plugins.common.linear import has_weight_norm, without_weight_norm
from fairseq_plugins.common.output_layer import selected_rows
from fairseq_plugins.common.source import Source
from fairseq_plugins.cpu.packing import BatchWeights, prepare_linear

if TYPE_CHECKING:
    from fairseq_plugins.common.model import IncrementalDecoder

_FIRST_CAPACITY = 16  # steps; initial capacity by default, and the least growth
_BROKEN = "rows may move only within their sentence, and sentences only if others are dropped"

_OPERATORS = torch.library.Library("fairseq_plugins", "FRAGMENT")
_OPERATORS.define("reorder_rows(Tensor state, Tensor order) -> Tensor")
_OPERATORS.impl("reorder_rows", lambda state, order: state.index_select(0, order), "CompositeExplicitAutograd")


class Decoding(Protocol):
    """The interface of a batch's decode-time state, implemented for this plugin's decoders and for fairseq's.

    Attributes:
        fixed: whether all tensors of the state keep their shapes and addresses; then no row may be dropped.
    """

    fixed: bool

    def make_room(self) -> None:
        """Check the position, and allocate memory if the state is full; called on the host before each step."""

    def step(self, tokens: Tensor, order: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Compute one step without synchronisation.

        Args:
            tokens: one token per row, (R,); in the first step, alternatively, one per sentence.
            order: previous row that each row continues, of the same shape; None if no row moved.

        Returns:
            Features (R, width) and the reported attention, (R, S) or None.
        """

    def output_layer(self, features: Tensor) -> Tensor:
        """Return the logits of features: (..., width) -> (..., V)."""

    def keep(self, kept: KeptSentences) -> None:
        """Drop all other sentences; the order of the next step refers to the kept ones."""


class StepwiseDecoding:
    """The base class of `Decoding` for this plugin's decoders.

    An object lives for one batch, so it never survives a change of the model's weights.  This plugin's search calls the
    methods of `Decoding`; fairseq's search calls the decoder's ``forward``, which calls `decode`.  A family implements
    `set_up`, `compute` and, if its state grows, `grow`.

    Args:
        decoder: decoder of the family.
        source: encoder output, one entry per sentence.
        beam: k, rows per sentence.
        capacity: number of steps to allocate.  If given, the state is `fixed` until this many steps were made.
        words: candidate words to predict, see `selected_rows`; None for all.
        packing: packed weights of the batch.

    Attributes:
        steps: number of steps so far, on the host.
        position: number of steps so far, on the device, (1,).
    """

    @torch.no_grad()
    def __init__(
        self,
        decoder: IncrementalDecoder,
        source: Source,
        beam: int,
        capacity: int | None,
        words: Tensor | None,
        packing: BatchWeights | None,
    ) -> None:
        if has_weight_norm(decoder):
            decoder = without_weight_norm(decoder, decoder.dictionary, decoder.packing)
        self.decoder = decoder
        self.source = source
        self.fixed = capacity is not None
        self.capacity = _FIRST_CAPACITY if capacity is None else capacity
        self.order = RowOrder(len(source.keys) * beam, beam)
        self.steps = 0
        self.position = torch.zeros(1, dtype=torch.long, device=source.keys.device)
        projection = decoder.output_projection
        if words is not None:
            projection = selected_rows(projection, words)
        self.packing = packing
        self.output_layer = self.prepare(projection.weight, projection.bias)
        self.set_up()

    @abstractmethod
    def set_up(self) -> None:
        """Prepare weights, project the source, and create the initial state, once per batch."""

    @abstractmethod
    def compute(self, tokens: Tensor, order: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Compute one step at `position`; see `Decoding.step`."""

    def prepare(self, weight: Tensor, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
        """Return the map ``x -> x Wᵀ + b`` for all steps, with the current weight, (O, K)."""
        return prepare_linear(weight, bias, self.order.rows, self.packing)

    def step(self, tokens: Tensor, order: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Compute one step; see `Decoding.step`."""
        result = self.compute(tokens, order)
        self.position.add_(1)
        return result

    def make_room(self) -> None:
        """Prepare the next step; see `Decoding.make_room`.

        Raises:
            ValueError: the step exceeds the model's positions.
        """
        self.decoder.embedding.check_length(self.steps + 1)
        if self.steps == self.capacity:
            self.grow(self.capacity if self.fixed else max(_FIRST_CAPACITY, self.capacity // 4))
        self.steps += 1

    def grow(self, steps: int) -> None:
        """Allocate memory for more steps."""
        self.capacity += steps

    def keep(self, kept: KeptSentences) -> None:
        """Drop all other sentences; see `Decoding.keep`."""
        self.source = self.source.select(kept.sentences)

    @torch.no_grad()
    def decode(self, prev_output_tokens: Tensor) -> tuple[Tensor, dict[str, list[Tensor | None]]]:
        """Decode all new tokens, for fairseq's search.

        Args:
            prev_output_tokens: all tokens so far, (R, T).

        Returns:
            Logits (R, n, V) for the n new tokens and, as ``"attn"``, their attention (R, n, S) or None.

        Raises:
            ValueError: there is no new token, a token exceeds the model's positions, or the number of rows does not
            match
                the encoder output.
        """
        length = prev_output_tokens.size(1)
        if length <= self.steps:
            raise ValueError(
                f"prev_output_tokens has {length} tokens, and {self.steps} are already decoded: pass all tokens so far"
            )
        rows, left, k = len(prev_output_tokens), self.order.left, self.order.beam
        if rows != left:
            raise ValueError(
                f"prev_output_tokens has {rows} rows, and the encoder output {left // k} x {k}: pass one for each"
            )
        features, attention = [], []
        for position in range(self.steps, length):
            self.make_room()
            order, kept = self.order.take_pending()
            if kept is not None:
                self.keep(kept)
            x, a = self.step(prev_output_tokens[:, position], order)
            features.append(x)
            attention.append(a)
        logits = self.output_layer(torch.stack(features, dim=1))
        return logits, {"attn": [None if a is None else torch.stack(attention, dim=1)]}  # type: ignore[arg-type]

    def by_sentence(self, x: Tensor) -> Tensor:
        """Return a view of rows by sentence: (R, ...) -> (B, k, ...)."""
        return x.view(len(self.source.keys), -1, x.size(-1))


def reorder_rows(state: Tensor, order: Tensor) -> Tensor:
    """Return a copy of the rows of a state, (R, ...), in a new order, (R,); without gradient if compiled.

    It is opaque to the compiler: torch 2.6 to 2.9 may fuse reading the rows with writing the next state to the same
    memory, which silently gives wrong translations.
    """
    if torch.compiler.is_compiling():
        return torch.ops.fairseq_plugins.reorder_rows(state, order)
    return state.index_select(0, order)


def update_state(state: Any, /, **parts: Tensor) -> None:
    """Assign the next values to attributes of a state, in place if the state is ``fixed``."""
    for name, value in parts.items():
        if state.fixed:
            getattr(state, name).copy_(value)
        else:
            setattr(state, name, value)


@dataclass(frozen=True)
class KeptSentences:
    """The sentences that remain after others have finished.

    Attributes:
        sentences: previous index of each remaining sentence, in the new order, (B,).
    """

    sentences: Tensor

    def of(self, x: Tensor) -> Tensor:
        """Return the entries of x, one per previous sentence, for the remaining sentences; x becomes invalid.

        On a CPU only moved sentences are copied, within the memory of x.
        """
        if x.device.type != "cpu":  # which sentences move is known on the device only
            return x.index_select(0, self.sentences)
        places, sentences = self._moves
        x.index_copy_(0, places, x.index_select(0, sentences))
        return x[: len(self.sentences)]

    @cached_property
    def _moves(self) -> tuple[Tensor, Tensor]:
        places = (self.sentences != torch.arange(len(self.sentences))).nonzero().squeeze(1)
        return places, self.sentences[places]


class RowOrder:
    """The rows of a batch, with pending re-orders.

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
        """Number of rows in the next step."""
        return self.rows if self._pending is None else self._pending.numel()

    def reorder(self, new_order: Tensor) -> None:
        """Let row i of the next step continue the current row ``new_order[i]``.

        Raises:
            RuntimeError: the order violates the contract of this module.
        """
        if new_order.numel() % self.beam or new_order.numel() > self.left:
            raise RuntimeError(f"cannot re-order {self.left} rows of {self.beam} per sentence to {new_order.numel()}")
        torch._assert_async(self._keeps_sentences(new_order), _BROKEN)
        self._pending = new_order if self._pending is None else self._pending.index_select(0, new_order)

    def take_pending(self) -> tuple[Tensor | None, KeptSentences | None]:
        """Return the composed order since the last call, and the remaining sentences; None if unchanged.

        Returns:
            ``(rows, sentences)``: indices of rows and sentences at the last call.
        """
        order, self._pending = self._pending, None
        if order is None or order.numel() == self.rows:
            return order, None
        self.rows = order.numel()
        return order, KeptSentences(torch.div(order[:: self.beam], self.beam, rounding_mode="floor"))

    def _keeps_sentences(self, order: Tensor) -> Tensor:
        """Return whether the rows of each sentence are adjacent, and in place if no sentence is dropped: ()."""
        sentences = torch.div(order, self.beam, rounding_mode="floor").view(-1, self.beam)
        places = sentences.narrow(1, 0, 1)
        if order.numel() == self.left:
            places = torch.arange(len(sentences), device=order.device).unsqueeze(1)
        return sentences.eq(places).all()
