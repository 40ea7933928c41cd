"""Searches with compiled steps, replayed as CUDA graphs on a GPU.

The numbers of sentences, source positions, steps and candidates are rounded up by padding, so that batches of similar
shapes share compiled code.  On a CPU, each batch has its own state, and only the steps are compiled.  On a GPU, all
batches of a shape share the memory of one state and two CUDA graphs: the first runs the encoder and sets up the state,
and the second makes a step.  The host only replays these graphs.

B sentences, S source positions, T steps, V candidates.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from fairseq.models import BaseFairseqModel
from torch import Tensor

from fairseq_plugins.common.decoding import StepwiseDecoding
from fairseq_plugins.common.model import IncrementalDecoder
from fairseq_plugins.common.weight_norm import has_weight_norm
from fairseq_plugins.cpu.packing import BatchWeights
from fairseq_plugins.search.beam_search import BeamState, TokenRules

_LENGTH_MULTIPLE = 32
_CANDIDATE_MULTIPLE = 256
MAX_ENTRIES = 16  # maximum number of captured searches in the cache

_CAPTURE_LOCK = threading.Lock()  # torch cannot capture two graphs concurrently

Run = Callable[[], None]
Step = Callable[[BeamState], None]
Begin = Callable[..., BeamState]  # `FastBeamSearch.begin`


class GraphCache:
    """The compiled steps and captured searches of a task's generators; a lock serialises batches of several threads.

    Args:
        capture: function that records the operations of another function, and returns a function that repeats them
            in the same memory.  By default, `capture_cuda_graph` is used on a GPU, and nothing is captured on a CPU.
        compile_step: function that compiles `BeamState.step` for each shape; `torch.compile` by default.

    Attributes:
        entries: captured searches, least recently used first.
    """

    def __init__(
        self, capture: Callable[[Run], Run] | None = None, compile_step: Callable[[Step], Step] | None = None
    ) -> None:
        self.capture, self.compile_step = capture, compile_step
        self._step = (compile_step or compile_with_torch)(BeamState.step)
        self.entries: dict[object, _CapturedSearch] = {}
        self._lock = threading.Lock()
        self._end: torch.cuda.Event | None = None

    def __reduce__(self) -> tuple[type[GraphCache], tuple[object, object]]:
        """Return how ``copy`` and ``pickle`` rebuild the cache: with the same functions, and without entries."""
        return GraphCache, (self.capture, self.compile_step)

    def supports(self, model: BaseFairseqModel, source: Tensor, steps: int) -> bool:
        """Return whether compiled steps support a model and a batch of sources, (B, S).

        Compiled steps do not support fairseq's models, weight normalisation (ConvS2S in training), autocast, or batches
        whose width, including padding, exceeds the model's number of positions.  Measuring the sentences without their
        padding would need a synchronisation.
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
    def search(
        self, model: Any, begin: Begin, source: Tensor, rules: TokenRules, batch_weights: BatchWeights | None
    ) -> Iterator[tuple[BeamState, Run]]:
        """Yield the state of a batch before the first step, created by ``begin``, and a function that makes a step."""
        # Later batches write to the state's tensors, which is forbidden for tensors created in inference mode.
        with self._lock, torch.inference_mode(False), torch.no_grad():
            for limit in ("cache_size_limit", "accumulated_cache_size_limit"):  # of compiled versions
                setattr(torch._dynamo.config, limit, max(1024, getattr(torch._dynamo.config, limit)))
            source, rules = _pad(source, rules, model.encoder)
            capture = self.capture or (capture_cuda_graph if source.is_cuda else None)
            if capture is not None:
                if self._end is not None:  # the previous batch may still run in another stream
                    torch.cuda.current_stream().wait_event(self._end)
                captured = self._captured(model, begin, source, rules, capture)
                captured.load(source, rules)
                try:
                    yield captured.state, captured.step
                finally:
                    self._end = torch.cuda.current_stream().record_event() if source.is_cuda else None
            else:  # begin with a small capacity that grows: attention to unused steps takes time on a CPU
                net_input = {"src_tokens": source, "src_lengths": None}
                state = begin(net_input, rules.clone(), _LENGTH_MULTIPLE, batch_weights=batch_weights)
                yield state, functools.partial(state.prepare_and_step, self._step)

    def _captured(
        self, model: Any, begin: Begin, source: Tensor, rules: TokenRules, capture: Callable[[Run], Run]
    ) -> _CapturedSearch:
        options = (rules.beam, rules.word_penalty, rules.temperature, rules.eos, rules.bos)
        shapes = tuple(part.shape for part in (source, *tensors_of(rules)))
        addresses = tuple((part.data_ptr(), part.dtype) for part in (*model.parameters(), *model.buffers()))
        dropout = tuple(part.training or getattr(part, "apply_during_inference", False) for part in model.modules())
        key = (model.decoder, model.decoder.wants_attention, options, shapes, addresses, dropout)
        captured = self.entries.pop(key, None)
        while len(self.entries) >= MAX_ENTRIES:
            del self.entries[next(iter(self.entries))]
        self.entries[key] = captured or _CapturedSearch(begin, source, rules, self._step, capture)
        return self.entries[key]


class _CapturedSearch:
    """The state and the two captured functions that all batches of one shape share; the first batch creates them."""

    def __init__(
        self, begin: Begin, source: Tensor, rules: TokenRules, step: Step, capture: Callable[[Run], Run]
    ) -> None:
        source, rules = source.clone(), rules.clone()
        self.inputs = [source, *tensors_of(rules)]
        net_input = {"src_tokens": source, "src_lengths": None}
        capacity = len(rules.forced)
        self.state = begin(net_input, rules, capacity)
        self.step = capture(functools.partial(step, self.state))
        self._restart = capture(lambda: copy_tensors_(begin(net_input, rules, capacity), self.state))

    def load(self, source: Tensor, rules: TokenRules) -> None:
        """Copy a batch into the captured tensors, and set the state to the start of this batch."""
        for own, value in zip(self.inputs, [source, *tensors_of(rules)], strict=True):
            own.copy_(value)
        self._restart()


def capture_cuda_graph(run: Run) -> Run:
    """Return a function that replays ``run`` as a CUDA graph.

    Before the capture, ``run`` is called twice, to compile code and allocate memory.
    """
    with _CAPTURE_LOCK:
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        # All graphs share one memory pool.  A replay can overwrite the outputs of other graphs, but these outputs are
        # no longer needed.
        pool = _pool(torch.cuda.current_device())
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            run()
    return graph.replay


@functools.cache
def _pool(device: int) -> Any:
    return torch.cuda.graph_pool_handle()


def copy_tensors_(source: object, target: object) -> None:
    """Copy all tensors of one state into another."""
    pairs = list(zip(tensors_of(source), tensors_of(target), strict=True))
    if any((value.shape, value.dtype) != (own.shape, own.dtype) for value, own in pairs):
        raise ValueError("copy_tensors_: the states of two batches have tensors of different shapes or types")
    for value, own in pairs:
        if value.data_ptr() != own.data_ptr():
            own.copy_(value)


def tensors_of(part: Any, packages: Set[str] = frozenset({__name__.partition(".")[0]})) -> Iterator[Tensor]:
    """Yield the tensors of a state and of its parts, except modules, in a fixed order.

    The attributes of an object are searched for tensors if the object's class is defined in one of ``packages``.  The
    attributes of a `StepwiseDecoding` are searched for tensors even if another package defines its class.  In this
    search, the other package is added to ``packages``.
    """
    match part:
        case Tensor():
            yield part
        case list() | tuple():
            for each in part:
                yield from tensors_of(each, packages)
        case dict():
            yield from tensors_of([*part.values()], packages)
        case functools.partial():
            yield from tensors_of([*part.args, *part.keywords.values()], packages)
        case torch.nn.Module():
            pass
        case _:
            package = type(part).__module__.partition(".")[0]
            if package in packages or isinstance(part, StepwiseDecoding):
                yield from tensors_of([*vars(part).values()], packages | {package})


@functools.cache  # all generators share the compiled code
def compile_with_torch(step: Step) -> Step:
    """Return a step that torch compiles at the first call with each shape."""
    return torch.compile(step, fullgraph=True, dynamic=False)


def _pad(source: Tensor, rules: TokenRules, encoder: Any) -> tuple[Tensor, TokenRules]:
    """Pad a batch to rounded sizes.

    The number of sentences is rounded up to a power of two, the number of steps to a multiple of 32, and the number of
    candidates to a multiple of 256.  The number of source positions is rounded up to a multiple of 32, but not above
    the encoder's maximum.  Added sentences contain only the end symbol.
    """
    sentences, length = source.shape
    more = (1 << (sentences - 1).bit_length()) - sentences
    source = F.pad(source, (0, min(_round_up(length), encoder.max_positions()) - length), value=encoder.padding_idx)
    source = F.pad(source, (0, 0, 0, more), value=encoder.padding_idx)
    source[sentences:, 0] = rules.eos
    steps = len(rules.forced)
    more_steps = _round_up(steps) - steps
    words = rules.words
    if words is not None:
        words = F.pad(words, (0, _round_up(len(words), _CANDIDATE_MULTIPLE) - len(words)), value=-1)
    return source, rules._replace(
        penalties=F.pad(rules.penalties, (0, 0, 0, more_steps)),
        forced=F.pad(rules.forced, (0, more, 0, more_steps), value=-1),
        last_steps=F.pad(rules.last_steps, (0, more)),
        words=words,
    )


def _round_up(length: int, multiple: int = _LENGTH_MULTIPLE) -> int:
    return -(-length // multiple) * multiple
