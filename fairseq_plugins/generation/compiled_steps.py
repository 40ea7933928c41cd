"""Decoding steps that `torch.compile` has made one program, on a GPU a CUDA graph.

Batches of about one shape share a program: their sentences and lengths are rounded up, and what is added is masked.
Everything that a step reads and writes has its place from the first step on, so that on a GPU nothing but the replay of
a graph is asked of the device.

B sentences, k hypotheses (rows) for each, R = B·k rows, S source positions, T steps.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fairseq_plugins.models.incremental import IncrementalDecoder, StepwiseDecoding
from fairseq_plugins.nn.decoder_state import RowOrder
from fairseq_plugins.nn.source import Source
from fairseq_plugins.nn.weight_norm import has_weight_norm

__all__ = ["CompiledDecoding", "CompiledSteps", "take_over", "tensors_of"]

logger = logging.getLogger(__name__)

_LENGTHS = 32  # lengths are rounded up to a multiple
_SHAPES = 32  # that are compiled; batches of others are decoded without
_CAPTURED = 8  # shapes whose memory is kept on a GPU


class CompiledSteps:
    """The decodings of a task's generators, whose steps are compiled; one batch at a time."""

    def __init__(self) -> None:
        self._shapes: set[tuple[int, ...]] = set()
        self._captured: dict[tuple[int | None, ...], StepwiseDecoding] = {}

    def __reduce__(self) -> tuple[type[CompiledSteps], tuple[()]]:
        """A copy captures for itself."""
        return CompiledSteps, ()

    @torch.no_grad()
    def start(self, decoder: IncrementalDecoder, encoder_out: Source, beam: int, steps: int) -> CompiledDecoding | None:
        """Begin a batch.

        Args:
            decoder: a decoder of this plugin.
            encoder_out: the encoder's result, one entry for each of B sentences.
            beam: k.
            steps: T, the most that will be made.

        Returns:
            None if it is not to be compiled: in the middle of training, where each batch has normalised weights of its
            own, and when there have been too many shapes.
        """
        sentences, length = encoder_out.padding_mask.shape
        shape = 1 << (sentences - 1).bit_length(), _round_up(length)
        if has_weight_norm(decoder) or not self._admits((*shape, beam)):
            return None
        padded = encoder_out.pad(*shape)
        rows = torch.arange(shape[0] * beam).div(beam, rounding_mode="floor")
        if padded.keys.is_cuda:
            decoding = self.captured(decoder.start(padded.reorder(rows), room=_round_up(steps)))
        else:  # where to attend to steps that may come takes long, and state may move
            decoding = decoder.start(padded.reorder(rows), room=_LENGTHS)
        return CompiledDecoding(decoding, sentences * beam, length)

    def captured(self, decoding: StepwiseDecoding) -> StepwiseDecoding:
        """The decoding in the memory of an earlier one of that shape, which a captured graph reads and writes."""
        shape = *decoding.source.padding_mask.shape, decoding.beam, decoding.room
        captured = self._captured.pop(shape, None)
        if captured is None or not take_over(captured, decoding):
            captured = decoding
            for tensor in tensors_of(captured):
                torch._dynamo.mark_static_address(tensor, guard=False)
        self._captured[shape] = captured  # the last
        if len(self._captured) > _CAPTURED:
            del self._captured[next(iter(self._captured))]
        return captured

    def _admits(self, shape: tuple[int, ...]) -> bool:
        if len(self._shapes) == _SHAPES and shape not in self._shapes:
            logger.warning(f"after {_SHAPES} shapes of batches no other is compiled: {shape} is decoded without")
            return False
        self._shapes.add(shape)
        # For each thread, and for all generators and lengths of outputs together.
        for limit in ("cache_size_limit", "accumulated_cache_size_limit"):
            setattr(torch._dynamo.config, limit, max(1024, getattr(torch._dynamo.config, limit)))
        return True


class CompiledDecoding:
    """One batch, some of whose rows and source positions are not there.

    Args:
        decoding: of fixed state.
        rows: R, which are the first.
        source_length: S.
    """

    def __init__(self, decoding: StepwiseDecoding, rows: int, source_length: int) -> None:
        self.decoding = decoding
        self.rows = rows
        self.source_length = source_length
        self.steps = 0
        self.all_rows = torch.arange(decoding.order.rows, device=decoding.position.device)
        self.missing = self.all_rows[rows:]
        self.missing_tokens = torch.zeros_like(self.missing)
        self.order = RowOrder(rows, decoding.beam)

    @torch.no_grad()
    def decode(self, prev_output_tokens: Tensor) -> tuple[Tensor, dict[str, list[Tensor | None]]]:
        """As `StepwiseDecoding.decode`, one token at a time.

        Raises:
            RuntimeError: rows have left.
            ValueError: there is not exactly one new token, or it lies beyond the model's positions.
        """
        decoding, length = self.decoding, prev_output_tokens.size(1)
        if length != self.steps + 1:
            raise ValueError(f"compiled steps are made one by one: {self.steps} were made, {length} tokens are given")
        decoding.check_length(length)
        order, kept = self.order.take()
        if kept is not None:
            raise RuntimeError("compiled steps keep the rows of sentences that have ended")
        if decoding.room is not None and decoding.room == self.steps:
            decoding.grow(decoding.room)
        # Not `F.pad`: of one token it would keep the stride, which grows, and a program is for the strides it has seen.
        tokens = torch.cat([prev_output_tokens[:, -1], self.missing_tokens])
        order = self.all_rows if order is None else torch.cat([order, self.missing])
        if tokens.is_cuda:  # what the step before has returned is not needed any more
            torch.compiler.cudagraph_mark_step_begin()
        features, attention = _compiled(tokens.is_cuda)(decoding, tokens, order)
        self.steps += 1
        logits = decoding.output_layer(features[: self.rows].unsqueeze(1))
        if attention is not None:
            attention = attention[: self.rows, : self.source_length].unsqueeze(1)
        return logits, {"attn": [attention]}


@functools.cache
def _compiled(captures: bool) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """`StepwiseDecoding.advance`, compiled for each shape that it meets."""
    mode = "reduce-overhead" if captures else None
    return torch.compile(StepwiseDecoding.advance, fullgraph=True, dynamic=False, mode=mode)


def _round_up(length: int) -> int:
    return -(-length // _LENGTHS) * _LENGTHS


def take_over(old: StepwiseDecoding, new: StepwiseDecoding) -> bool:
    """Make the old decoding the new one by copying into its memory, unless the model's weights lie elsewhere by now.

    Returns:
        whether that was done; else the old one is of no use any more.
    """
    if old.decoder is not new.decoder:
        return False
    old.output_layer = new.output_layer  # no part of a step; among candidates of other sizes
    own = (*new.decoder.parameters(), *new.decoder.buffers())
    weights = {each.untyped_storage().data_ptr() for each in own}
    pairs = list(zip(tensors_of(old), tensors_of(new), strict=True))
    moved = [(mine, other) for mine, other in pairs if mine.data_ptr() != other.data_ptr()]
    if any(each.untyped_storage().data_ptr() in weights for pair in moved for each in pair):
        return False
    for mine, other in moved:
        mine.copy_(other)
    return True


def tensors_of(part: Any) -> Iterator[Tensor]:
    """All tensors of a decoding's state and weights, in an order that is the same for all decodings of a model."""
    match part:
        case Tensor():
            yield part
        case list() | tuple():
            for each in part:
                yield from tensors_of(each)
        case functools.partial():
            yield from tensors_of([*part.args, *part.keywords.values()])
        case _ if type(part).__module__.startswith(__name__.split(".")[0]):
            yield from tensors_of(list(vars(part).values()))
