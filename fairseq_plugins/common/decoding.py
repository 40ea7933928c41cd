"""Decode-time state: `StepwiseDecoding` computes the steps of one batch, and `RowOrder` stores the order of its rows.

B sentences, k hypotheses (rows) per sentence, R = B·k rows, T target positions, S source positions, V vocabulary.

A *row* is one hypothesis.  Between two steps, a beam search selects the hypotheses to continue, and drops finished
sentences.  The row indices of the selected hypotheses are stored until the next step, so that each row is copied only
once.

Contract: the k rows of a sentence are adjacent, each hypothesis stays among the rows of its sentence, and a sentence
changes its place, with all its rows, only when another sentence is dropped.
`RowOrder.reorder`, through which fairseq's search re-orders rows, checks the contract on the device, to avoid a
synchronisation.  On a GPU, a violation of the contract therefore raises an error only at a later call.  This plugin's
search keeps the contract, and `step` does not check it again.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from fairseq_plugins.common.output_layer import selected_rows
from fairseq_plugins.common.source import Source
from fairseq_plugins.common.weight_norm import has_weight_norm, without_weight_norm
from fairseq_plugins.cpu.packing import BatchWeights, prepare_linear

if TYPE_CHECKING:
    from fairseq_plugins.common.model import IncrementalDecoder

_FIRST_CAPACITY = 16  # default initial capacity, and minimum growth, in steps
_BROKEN = (
    "new_order: a hypothesis may move only among the rows of its sentence, and a sentence may move only if another "
    "sentence is dropped"
)

_OPERATORS = torch.library.Library("fairseq_plugins", "FRAGMENT")
_OPERATORS.define("reorder_rows(Tensor state, Tensor order) -> Tensor")
_OPERATORS.impl("reorder_rows", lambda state, order: state.index_select(0, order), "CompositeExplicitAutograd")


class Decoding(Protocol):
    """The interface of a batch's decode-time state, implemented for this plugin's decoders and for fairseq's."""

    fixed: bool  # if true, only `make_room` changes shapes and addresses of tensors, and rows cannot be dropped

    def make_room(self) -> None:
        """Begin a step: check that the model has a position for the next token, and allocate memory if necessary.

        Call this method on the host before each step.  A search that is captured as CUDA graphs does not call it, and
        allocates memory for all steps at the start.
        """

    def step(self, tokens: Tensor, order: Tensor) -> tuple[Tensor, Tensor | None]:
        """Compute one step without synchronisation.

        Args:
            tokens: one token per row, (R,).  The first step of a `StepwiseDecoding` that is not `fixed` also accepts
                one token per sentence.
            order: index of the previous row that each row continues, in the shape of ``tokens``.

        Returns:
            Features (R, width) and the reported attention, (R, S) or None.
        """

    def output_layer(self, features: Tensor) -> Tensor:
        """Return the logits of features, (..., width) -> (..., V)."""

    def keep(self, kept: KeptSentences) -> None:
        """Drop all sentences except ``kept``.  The next step's ``order`` must contain only rows of kept sentences."""


class StepwiseDecoding:
    """A `Decoding` for this plugin's decoders; each model family has a subclass.

    An instance is used for one batch only, during which the model's weights do not change.  This plugin's search calls
    the methods of `Decoding`.  fairseq's search calls the decoder's ``forward``, which calls `decode`.  A subclass
    implements `set_up`, `compute` and, if its state needs them, `projected` and `grow`.

    Args:
        source: encoder output, one entry per sentence.
        capacity: number of steps to allocate memory for.  If the capacity is given, the state is `fixed`: its
            tensors keep their shapes and addresses until `make_room` needs more memory.
        words: candidate words to predict (see `selected_rows`), or None for all words.

    Attributes:
        steps: number of steps that `make_room` has begun, as a Python integer.
        position: number of steps that are complete, as a tensor on the device, (1,).
    """

    @torch.no_grad()
    def __init__(
        self,
        decoder: IncrementalDecoder,
        source: Source,
        beam: int,
        capacity: int | None,
        words: Tensor | None,
        batch_weights: BatchWeights | None,
    ) -> None:
        if has_weight_norm(decoder):
            decoder = without_weight_norm(decoder, decoder.dictionary, decoder.batch_weights)
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
        self.batch_weights = batch_weights
        self.output_layer = self.prepare(projection.weight, projection.bias)
        self.set_up()

    @abstractmethod
    def set_up(self) -> None:
        """Prepare the weights, project the source, and create the initial state, once per batch."""

    @abstractmethod
    def compute(self, tokens: Tensor, order: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Compute one step at `position`; see `Decoding.step`."""

    def projected(self) -> Iterable[Any]:
        """Return those objects in the state that hold tensors with one entry per sentence.

        Each object lists the names of these tensors in its attribute ``per_sentence``.
        """
        return ()

    def prepare(self, weight: Tensor, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
        """Return the function ``x -> x Wᵀ + b`` for use in all steps; the weight has shape (O, K)."""
        return prepare_linear(weight, bias, self.order.rows, self.batch_weights)

    def step(self, tokens: Tensor, order: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Compute one step; see `Decoding.step`.  If ``order`` is None, no row has moved."""
        result = self.compute(tokens, order)
        self.position.add_(1)
        return result

    def make_room(self) -> None:
        """Prepare the next step; see `Decoding.make_room`."""
        self.decoder.embedding.check_length(self.steps + 1)
        if self.steps == self.capacity:
            self.grow(self.capacity if self.fixed else max(_FIRST_CAPACITY, self.capacity // 4))
        self.steps += 1

    def grow(self, steps: int) -> None:
        """Allocate memory for more steps."""
        self.capacity += steps

    def keep(self, kept: KeptSentences) -> None:
        """Drop all sentences except ``kept``; see `Decoding.keep`."""
        self.source = self.source.select(kept.sentences)
        for part in self.projected():
            for name in part.per_sentence:
                setattr(part, name, kept.of(getattr(part, name)))

    @torch.no_grad()
    def decode(self, prev_output_tokens: Tensor) -> tuple[Tensor, dict[str, list[Tensor | None]]]:
        """Decode new tokens; return their logits, (R, n, V), and attention.

        Args:
            prev_output_tokens: all tokens so far, (R, T), of which the last n tokens are new.
        """
        length = prev_output_tokens.size(1)
        if length <= self.steps:
            raise ValueError(
                f"prev_output_tokens has {length} tokens, and {self.steps} are already decoded: pass all tokens so far"
            )
        rows, k = self.order.left, self.order.beam
        if len(prev_output_tokens) != rows:
            raise ValueError(
                f"prev_output_tokens has {len(prev_output_tokens)} rows, and the encoder output has {rows // k} "
                f"sentences of {k} rows: pass {rows} rows"
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
        """Return a view with the rows grouped by sentence, (R, width) -> (B, k, width)."""
        return x.view(len(self.source.keys), -1, x.size(-1))


class FairseqDecoding:
    """A `Decoding` for fairseq's decoders, which read all words so far and one copy of the encoder output per row."""

    fixed = False

    def __init__(self, model: Any, encoder_out: Any, source: Tensor, beam: int) -> None:
        self.encoder, self.decoder, self.beam = model.encoder, model.decoder, beam
        rows = torch.arange(len(source) * beam, device=source.device)
        self.encoder_out = self.encoder.reorder_encoder_out(encoder_out, rows.div(beam, rounding_mode="floor"))
        self.words = rows.new_empty(len(rows), 0)
        self.state: dict[str, Any] = {}

    def make_room(self) -> None:
        """Do nothing: fairseq's decoders allocate memory in each step."""

    def step(self, tokens: Tensor, order: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return logits, (R, V), and attention, (R, S) or None."""
        if self.state:
            self.decoder.reorder_incremental_state_scripting(self.state, order)
        self.words = torch.cat([self.words.index_select(0, order), tokens.unsqueeze(1)], dim=1)
        logits, *extra = self.decoder.forward(self.words, encoder_out=self.encoder_out, incremental_state=self.state)
        attention = extra[0] if extra else None
        if isinstance(attention, dict):
            attention = attention["attn"]
        if isinstance(attention, list | tuple):
            attention = attention[0]
        return logits[:, -1], None if attention is None else attention[:, -1]

    def output_layer(self, features: Tensor) -> Tensor:
        """Return the features unchanged, because `step` has already computed logits."""
        return features

    def keep(self, kept: KeptSentences) -> None:
        """Drop all sentences except ``kept``."""
        rows = kept.sentences.unsqueeze(1) * self.beam + torch.arange(self.beam, device=kept.sentences.device)
        self.encoder_out = self.encoder.reorder_encoder_out(self.encoder_out, rows.flatten())


def reorder_rows(state: Tensor, order: Tensor | None) -> Tensor:
    """Return a copy of a state, (R, ...), with its rows in a new order, (R,); if ``order`` is None, return the state.

    In compiled code, a custom operator without gradient re-orders the rows, so that the compiler cannot fuse the
    re-ordering with other operations.  If the compiler fused the re-ordering, torch 2.6 to 2.9 might write the next
    state to memory that is still being read, and translations would be silently wrong.
    """
    if order is None:
        return state
    if torch.compiler.is_compiling():
        return torch.ops.fairseq_plugins.reorder_rows(state, order)
    return state.index_select(0, order)


def update_state(state: Any, /, **parts: Tensor) -> None:
    """Set attributes of a state to their next values; if the state is ``fixed``, copy the values into its tensors."""
    for name, value in parts.items():
        if state.fixed:
            getattr(state, name).copy_(value)
        else:
            setattr(state, name, value)


@dataclass(frozen=True)
class KeptSentences:
    """The sentences of a batch that remain after other sentences have finished."""

    sentences: Tensor  # index that each remaining sentence had in the previous step, (B,)

    def of(self, x: Tensor) -> Tensor:
        """Return the entries of the remaining sentences; x has one entry for each sentence of the previous step.

        On a CPU, this method overwrites x and copies only the entries whose index changes.  Do not use x afterwards.
        """
        # On a GPU, finding the entries whose index changes would need a synchronisation.
        if x.device.type != "cpu":
            return x.index_select(0, self.sentences)
        places, sentences = self._moves
        x.index_copy_(0, places, x.index_select(0, sentences))
        return x[: len(self.sentences)]

    @cached_property
    def _moves(self) -> tuple[Tensor, Tensor]:
        places = (self.sentences != torch.arange(len(self.sentences))).nonzero().squeeze(1)
        return places, self.sentences[places]


class RowOrder:
    """The rows of a batch, ``beam`` per sentence, and the new order that the next step has to apply."""

    def __init__(self, rows: int, beam: int) -> None:
        self.rows = rows
        self.beam = beam
        self._pending: Tensor | None = None

    @property
    def left(self) -> int:
        """Number of rows in the next step."""
        return self.rows if self._pending is None else self._pending.numel()

    def reorder(self, new_order: Tensor) -> None:
        """Set the order of the next step: row i of the next step continues the current row ``new_order[i]``."""
        if new_order.numel() % self.beam or new_order.numel() > self.left:
            rows = new_order.numel()
            raise RuntimeError(f"new_order has {rows} rows: pass a multiple of {self.beam}, at most {self.left}")
        torch._assert_async(self._keeps_sentences(new_order), _BROKEN)
        self._pending = new_order if self._pending is None else self._pending.index_select(0, new_order)

    def take_pending(self) -> tuple[Tensor | None, KeptSentences | None]:
        """Return the pending order of the rows and the sentences that remain, and clear the pending order.

        The order is None if `reorder` was not called.  The sentences are None if all sentences remain.
        """
        order, self._pending = self._pending, None
        if order is None or order.numel() == self.rows:
            return order, None
        self.rows = order.numel()
        return order, KeptSentences(torch.div(order[:: self.beam], self.beam, rounding_mode="floor"))

    def _keeps_sentences(self, order: Tensor) -> Tensor:
        """Return whether the rows that ``order`` assigns to one sentence all come from a single sentence.

        If ``order`` drops no sentence, each sentence must also keep its index.
        """
        sentences = torch.div(order, self.beam, rounding_mode="floor").view(-1, self.beam)
        places = sentences.narrow(1, 0, 1)
        if order.numel() == self.left:
            places = torch.arange(len(sentences), device=order.device).unsqueeze(1)
        return sentences.eq(places).all()
