"""Decode-time state: one object per batch, which makes the steps, and the bookkeeping of its rows.

B sentences, k hypotheses (rows) for each, R = B·k rows, T target positions, S source positions, V vocabulary.

A *row* is one hypothesis; a *sentence* has k of them, next to each other.  Between two steps a beam search tells each
row which earlier row it continues, and drops sentences that have finished.  fairseq announces that by an index; no row
is moved until the next step, which gathers its rows and shifts its windows in one go.

The contract, which fairseq's searches keep: a re-order moves rows only within their sentence, and sentences stay where
they are.  If some leave, the others may move into the gaps, all rows of a sentence together.  The device checks it, so
that the host need not wait: a GPU stops with an assertion of its own, at some later call.
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
from fairseq_plugins.cpu.packing import BatchPacking, prepare_linear

if TYPE_CHECKING:
    from fairseq_plugins.common.model import IncrementalDecoder

_FIRST_CAPACITY = 16  # steps to have memory for, if no number is given; at least so many are added when it is full
_BROKEN = "rows may change places only within their sentence, and sentences only when others leave"

_OPERATORS = torch.library.Library("fairseq_plugins", "FRAGMENT")
_OPERATORS.define("reorder_rows(Tensor state, Tensor order) -> Tensor")
_OPERATORS.impl("reorder_rows", lambda state, order: state.index_select(0, order), "CompositeExplicitAutograd")


class Decoding(Protocol):
    """The state of a batch between steps, as a search sees it, of this plugin's decoders or of fairseq's.

    Attributes:
        fixed: whether all tensors of the state keep their shapes and places in memory; then no row may leave.
    """

    fixed: bool

    def make_room(self) -> None:
        """The host's part before each step: check the position, and allocate memory if the state is full."""

    def step(self, tokens: Tensor, order: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Make one step, without a look at any number on the device.

        Args:
            tokens: one for each row, (R,): the k rows of a sentence, or in the first step one for each sentence.
            order: the row of the step before that each row continues, of the same shape; None when no row moved.

        Returns:
            features (R, width) and the reported attention, (R, S) or None.
        """

    def output_layer(self, features: Tensor) -> Tensor:
        """Return the logits of features: (..., width) -> (..., V)."""

    def keep(self, kept: KeptSentences) -> None:
        """Drop all sentences but these; the order of the next step is of them."""


class StepwiseDecoding:
    """The `Decoding` of a decoder of this plugin.

    It lives as long as the batch, so no part of it outlasts a change of the model's weights.  This plugin's search
    calls the methods of `Decoding`; under fairseq's own search a decoder's ``forward`` does (`decode`).  A family
    implements `set_up`, `compute` and, where its state grows, `grow`.

    Args:
        decoder: the family's.
        source: the encoder's result, one entry for each of B sentences.
        beam: k, rows of each sentence.
        capacity: steps to have memory for.  If given, the state is `fixed`, until there have been so many steps and
            `grow` has to be called.
        words: the words to predict among, see `selected_rows`; None for all.
        packing: packed weights of the batch.

    Attributes:
        steps: how many the host knows of.
        position: how many the device knows of, (1,).
    """

    @torch.no_grad()
    def __init__(
        self,
        decoder: IncrementalDecoder,
        source: Source,
        beam: int,
        capacity: int | None,
        words: Tensor | None,
        packing: BatchPacking | None,
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
        """Compute, once per batch, what steps need of plain weights and of the source, and the first state."""

    @abstractmethod
    def compute(self, tokens: Tensor, order: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Compute one step, as `Decoding.step`, at `position`."""

    def prepare(self, weight: Tensor, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
        """Return the map ``x -> x Wᵀ + b`` for all steps, with the weight, (O, K), as it is now."""
        return prepare_linear(weight, bias, self.order.rows, self.packing)

    def step(self, tokens: Tensor, order: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """As `Decoding.step`."""
        result = self.compute(tokens, order)
        self.position.add_(1)
        return result

    def make_room(self) -> None:
        """As `Decoding.make_room`.

        Raises:
            ValueError: the step lies beyond the model's positions.
        """
        self.decoder.embedding.check_length(self.steps + 1)
        if self.steps == self.capacity:
            self.grow(self.capacity if self.fixed else max(_FIRST_CAPACITY, self.capacity // 4))
        self.steps += 1

    def grow(self, steps: int) -> None:
        """Allocate memory for so many more steps."""
        self.capacity += steps

    def keep(self, kept: KeptSentences) -> None:
        """As `Decoding.keep`."""
        self.source = self.source.select(kept.sentences)

    @torch.no_grad()
    def decode(self, prev_output_tokens: Tensor) -> tuple[Tensor, dict[str, list[Tensor | None]]]:
        """Decode the tokens that have not been decoded yet, for fairseq's search.

        Args:
            prev_output_tokens: (R, T), all tokens so far.

        Returns:
            logits (R, n, V) for the n new tokens and, as ``"attn"``, their attention (R, n, S) or None.

        Raises:
            ValueError: there is no new token, a token lies beyond the model's positions, or the number of rows does not
                fit the encoder's result.
        """
        length = prev_output_tokens.size(1)
        if length <= self.steps:
            raise ValueError(
                f"{self.steps} tokens of each row have been decoded and {length} are given; pass all tokens so far"
            )
        rows, left, k = len(prev_output_tokens), self.order.left, self.order.beam
        if rows != left:
            raise ValueError(f"{rows} target rows for an encoder's output of {left // k} x {k} rows")
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
        """(R, ...) -> (B, k, ...), without a copy."""
        return x.view(len(self.source.keys), -1, x.size(-1))


def reorder_rows(state: Tensor, order: Tensor) -> Tensor:
    """Return the rows of a state, (R, ...), in their new order, (R,): a copy, without gradient where compiled.

    A compiler must not look into it.  Where a state stays in its place in memory, torch's (2.6 to 2.9) may read the
    rows in the loop that writes the next state there, and translate wrongly without an error.
    """
    if torch.compiler.is_compiling():
        return torch.ops.fairseq_plugins.reorder_rows(state, order)
    return state.index_select(0, order)


def update_state(state: Any, /, **parts: Tensor) -> None:
    """Give parts of a state their next values, in place in memory if it is ``fixed``."""
    for name, value in parts.items():
        if state.fixed:
            getattr(state, name).copy_(value)
        else:
            setattr(state, name, value)


@dataclass(frozen=True)
class KeptSentences:
    """The sentences that are left after others have finished.

    Attributes:
        sentences: their numbers before, in their new order, (B,).
    """

    sentences: Tensor

    def of(self, x: Tensor) -> Tensor:
        """Return the entries of x, one for each sentence before, for those that are left; x must not be used after.

        On the CPU only sentences with a new place are copied, within the memory of x.
        """
        if x.device.type != "cpu":  # the host does not know which sentences move
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
        """Return the composed order since the last call, and the sentences that are left; None if unchanged.

        Returns:
            ``(rows, sentences)``: indices into the rows and the sentences of the last call.
        """
        order, self._pending = self._pending, None
        if order is None or order.numel() == self.rows:
            return order, None
        self.rows = order.numel()
        return order, KeptSentences(torch.div(order[:: self.beam], self.beam, rounding_mode="floor"))

    def _keeps_sentences(self, order: Tensor) -> Tensor:
        """Return whether rows of a sentence are together, and in its place if no sentence leaves: ()."""
        sentences = torch.div(order, self.beam, rounding_mode="floor").view(-1, self.beam)
        places = sentences.narrow(1, 0, 1)
        if order.numel() == self.left:
            places = torch.arange(len(sentences), device=order.device).unsqueeze(1)
        return sentences.eq(places).all()
