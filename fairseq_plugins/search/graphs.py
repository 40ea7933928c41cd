"""Searches whose steps are one program: compiled by torch, and on a GPU replayed as CUDA graphs.

Batches of about one shape share a program: sentences, lengths and candidates are rounded up, and what is added is
masked.  On a processor a batch has a state of its own, and only its steps are compiled.  On a GPU the state has its
place in memory, where a batch is set up by one program, from the encoder on, and searched by another, so that the host
asks for hardly anything but replays.

B sentences, S source positions, T steps, V candidates.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from fairseq.models import BaseFairseqModel
from torch import Tensor

from fairseq_plugins.common.linear import has_weight_norm
from fairseq_plugins.common.model import IncrementalDecoder
from fairseq_plugins.cpu.packing import BatchPacking
from fairseq_plugins.search.beam_search import BeamState, TokenRules

_LENGTHS = 32  # lengths are rounded up to a multiple
_CANDIDATES = 256
MOST_KEPT = 16  # shapes whose memory and graphs are kept on a GPU

_CAPTURING = threading.Lock()  # of which torch can do one at a time

Run = Callable[[], None]
Step = Callable[[BeamState], None]
Begin = Callable[..., BeamState]  # `FastBeamSearch.begin`


class GraphCache:
    """The programs of a task's generators; one batch at a time.

    Args:
        capture: makes of a function a program that does the same again in the same memory; by default a CUDA graph on
            a GPU, and none on a CPU, where each batch then has a state of its own.
        compile_step: compiles `BeamState.step` for each shape that it meets; by default torch does.

    Attributes:
        kept: memory of batches, with what runs in it; the least recently used first.
    """

    def __init__(
        self, capture: Callable[[Run], Run] | None = None, compile_step: Callable[[Step], Step] | None = None
    ) -> None:
        self.capture, self.compile_step = capture, compile_step
        self._step = (compile_step or compiled)(BeamState.step)
        self.kept: dict[object, _Captured] = {}
        self._lock = threading.Lock()
        self._end: torch.cuda.Event | None = None

    def __reduce__(self) -> tuple[type[GraphCache], tuple[object, object]]:
        """A copy makes its own."""
        return GraphCache, (self.capture, self.compile_step)

    def can_run(self, model: BaseFairseqModel, source: Tensor, steps: int) -> bool:
        """Whether a batch, (B, S), of this model is searched by programs, in so many steps.

        Not while weights are normalised anew for each batch, as in ConvS2S's training, nor under autocast; not with
        fairseq's models, nor beyond the model's positions, of which the host would have to know.
        """
        decoder = model.decoder
        return (
            isinstance(decoder, IncrementalDecoder)
            and not has_weight_norm(decoder)
            and not torch.is_autocast_enabled(source.device.type)
            and source.size(1) <= model.encoder.max_positions()
            and steps <= decoder.max_positions()
        )

    @contextmanager
    def batch(
        self, model: Any, begin: Begin, source: Tensor, rules: TokenRules, packing: BatchPacking | None
    ) -> Iterator[tuple[BeamState, Run]]:
        """The search of a batch before its first step, and the step.

        Args:
            model: of this plugin.
            begin: what makes the search.
            source: (B, S).
            rules: of the batch.
            packing: packed weights of the batch; a captured program multiplies with plain weights.
        """
        # What other batches will write to must be no inference tensor.
        with self._lock, torch.inference_mode(False), torch.no_grad():
            for limit in ("cache_size_limit", "accumulated_cache_size_limit"):  # of programs, in each thread
                setattr(torch._dynamo.config, limit, max(1024, getattr(torch._dynamo.config, limit)))
            source, rules = _rounded_up(source, rules, model.encoder)
            capture = self.capture or (capture_cuda_graph if source.is_cuda else None)
            if capture is not None:
                if self._end is not None:  # of the batch before, which another stream may still have to read
                    torch.cuda.current_stream().wait_event(self._end)
                captured = self._captured(model, begin, source, rules, capture)
                captured.set_up_for(source, rules)
                try:
                    yield captured.beams, captured.step
                finally:
                    self._end = torch.cuda.current_stream().record_event() if source.is_cuda else None
            else:  # on a processor, where attending to steps not yet made takes long: with room for few, which grows
                beams = begin({"src_tokens": source, "src_lengths": None}, rules.clone(), _LENGTHS, packing=packing)
                yield beams, functools.partial(beams.begin_and_step, self._step)

    def _captured(
        self, model: Any, begin: Begin, source: Tensor, rules: TokenRules, capture: Callable[[Run], Run]
    ) -> _Captured:
        numbers = (rules.beam, rules.word_penalty, rules.temperature, rules.eos, rules.bos)
        shapes = tuple(part.shape for part in (source, *tensors_of(rules)))
        places = tuple((part.data_ptr(), part.dtype) for part in (*model.parameters(), *model.buffers()))
        drops = tuple(part.training or getattr(part, "apply_during_inference", False) for part in model.modules())
        key = (model.decoder, model.decoder.wants_attention, numbers, shapes, places, drops)
        captured = self.kept.pop(key, None)
        while len(self.kept) >= MOST_KEPT:
            del self.kept[next(iter(self.kept))]
        self.kept[key] = captured or _Captured(begin, source, rules, self._step, capture)
        return self.kept[key]


class _Captured:
    """The memory of batches of one shape, and what runs in it.

    Args:
        begin, source, rules: as of `GraphCache.batch`; the first batch of its shape.
        step: that of a search.
        capture: as of `GraphCache`.
    """

    def __init__(
        self, begin: Begin, source: Tensor, rules: TokenRules, step: Step, capture: Callable[[Run], Run]
    ) -> None:
        source, rules = source.clone(), rules.clone()
        self.inputs = [source, *tensors_of(rules)]
        net_input = {"src_tokens": source, "src_lengths": None}
        capacity = len(rules.forced)
        self.beams = begin(net_input, rules, capacity)
        self.step = capture(functools.partial(step, self.beams))
        self.set_up = capture(lambda: copy_tensors_(begin(net_input, rules, capacity), self.beams))

    def set_up_for(self, source: Tensor, rules: TokenRules) -> None:
        """Begin a batch."""
        for mine, given in zip(self.inputs, [source, *tensors_of(rules)], strict=True):
            mine.copy_(given)
        self.set_up()


def capture_cuda_graph(run: Run) -> Run:
    """Capture a CUDA graph of a function, which runs a few times before, so that all is compiled and allocated."""
    with _CAPTURING:
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        # Graph outputs are not reused, so all graphs share one memory pool.
        pool = _pool(torch.cuda.current_device())
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            run()
    return graph.replay


@functools.cache
def _pool(device: int) -> Any:
    return torch.cuda.graph_pool_handle()


def copy_tensors_(new: object, place: object) -> None:
    """Copy all tensors of one state into another of the same kind.

    Raises:
        ValueError: they are not of one kind; nothing has been copied.
    """
    pairs = list(zip(tensors_of(new), tensors_of(place), strict=True))
    if any((value.shape, value.dtype) != (mine.shape, mine.dtype) for value, mine in pairs):
        raise ValueError("the states of two batches do not fit together")
    for value, mine in pairs:
        if value.data_ptr() != mine.data_ptr():
            mine.copy_(value)


def tensors_of(part: Any) -> Iterator[Tensor]:
    """The tensors of an object of this plugin and its parts, modules left out, in the same order for all of a kind."""
    match part:
        case Tensor():
            yield part
        case list() | tuple():
            for each in part:
                yield from tensors_of(each)
        case functools.partial():
            yield from tensors_of([*part.args, *part.keywords.values()])
        case torch.nn.Module():
            pass
        case _ if type(part).__module__.startswith(__name__.split(".")[0]):
            yield from tensors_of(list(vars(part).values()))


@functools.cache  # one for all generators
def compiled(step: Step) -> Step:
    """Compiled by torch, for each shape that it meets."""
    return torch.compile(step, fullgraph=True, dynamic=False)


def _rounded_up(source: Tensor, rules: TokenRules, encoder: Any) -> tuple[Tensor, TokenRules]:
    """The batch in the next larger shape for which there is a program.

    Sentences, to a power of two: those that are added are ends.  Lengths, and candidates.
    """
    sentences, length = source.shape
    more = (1 << (sentences - 1).bit_length()) - sentences
    source = F.pad(source, (0, min(_round_up(length), encoder.max_positions()) - length), value=encoder.padding_idx)
    source = F.pad(source, (0, 0, 0, more), value=encoder.padding_idx)
    source[sentences:, 0] = rules.eos
    steps = len(rules.forced)
    later = _round_up(steps) - steps
    words = rules.words
    if words is not None:
        words = F.pad(words, (0, _round_up(len(words), _CANDIDATES) - len(words)), value=-1)
    return source, rules._replace(
        penalties=F.pad(rules.penalties, (0, 0, 0, later)),
        forced=F.pad(rules.forced, (0, more, 0, later), value=-1),
        last=F.pad(rules.last, (0, more)),
        words=words,
    )


def _round_up(length: int, size: int = _LENGTHS) -> int:
    return -(-length // size) * size
