"""Compiled and captured searches: one per shape, without synchronisation or constants from the first batch."""

from __future__ import annotations

import copy
import shutil
from typing import Any

import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

from fairseq_plugins.common.decoding import StepwiseDecoding
from fairseq_plugins.cpu.packing import PackedWeightCache
from fairseq_plugins.search import graphs
from fairseq_plugins.search.generator import FastBeamSearch
from fairseq_plugins.search.graphs import GraphCache, Run, copy_tensors_, tensors_of
from fairseq_plugins.vocabulary.candidates import Candidates
from tests.search.searching import assert_same, generate

BEAM = 3
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler: g++")
# These batches are padded to the same shape: up to four sentences and up to 32 words.
SHAPES = [[9, 6, 3, 1], [4, 4, 2], [32, 32, 5, 4]]
PREFIX = torch.tensor([[7, 8], [10, 1], [12, 2]])


def unchanged(function: Any) -> Any:
    return function


def record(run: Run) -> Run:
    """Record the operators of a run; calling the result repeats them in the same memory, like a CUDA graph."""
    graph: Run = make_fx(run)()
    return graph


def check(model: Any, dictionary: Any, made: GraphCache, batches: list[Tensor], **options: Any) -> None:
    """Compare batches with fairseq's search in double precision, with token rules that differ between batches."""
    for number, source in enumerate(batches):
        own = {"beam_size": BEAM, "max_len_b": 20 - number, "min_len": number, "unk_penalty": number, **options}
        if len(source) == len(PREFIX):
            own["prefix_tokens"] = PREFIX
        with torch.inference_mode(number % 2 == 0):
            actual = generate(FastBeamSearch, [model], dictionary, source, graphs=made, **own)
        assert_same(actual, generate(SequenceGenerator, [model], dictionary, source, **own), tolerance=2e-6)


@needs_compiler
def test_compiled_searches(build, architecture, sentences, dictionary) -> None:
    """Batches, weights and generators share compiled code."""
    model, made = build(architecture).double(), GraphCache()
    model.make_generation_fast_(need_attn=True)
    batches = [sentences(lengths) for lengths in SHAPES]
    check(model, dictionary, made, batches[:1])
    with torch._dynamo.config.patch(error_on_recompile=True):
        check(model, dictionary, made, [batches[0], *batches])
        for parameter in model.parameters():
            parameter.data.mul_(1.01)
        check(model, dictionary, made, batches[1:])


@needs_compiler
@pytest.mark.parametrize("precision", ["float32", pytest.param("int8", marks=pytest.mark.slow)])
def test_compiled_searches_with_candidates(build, sentences, dictionary, precision: str) -> None:
    """Greedy search with candidates per batch and packed weights, without attention."""
    model = build("convs2s_tiny")
    model.make_generation_fast_()
    words = Candidates(torch.randint(20, 44, (len(dictionary), 1)), torch.arange(len(dictionary)) < 20)
    options = {"candidates": words, "beam_size": 1, "max_len_b": 20}
    made, weight_cache = GraphCache(), PackedWeightCache(precision)
    # In int8, the rounding of inputs depends on the whole batch, and therefore on its padding.
    batches = [sentences([length]) for length in ((9, 9, 32, 3) if precision == "float32" else (32, 32, 32, 32))]
    for number, source in enumerate(batches):
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            actual = generate(
                FastBeamSearch, [model], dictionary, source, graphs=made, weight_cache=weight_cache, **options
            )
        expected = generate(
            FastBeamSearch, [model], dictionary, source, weight_cache=PackedWeightCache(precision), **options
        )
        assert_same(actual, expected, tolerance=1e-4 if precision == "float32" else 0.1)


@needs_compiler
@pytest.mark.slow
def test_long_compiled_searches(build, architecture, sentences, dictionary) -> None:
    """The state must grow in a long search."""
    model = build(architecture, max_target_positions=500).double()
    model.make_generation_fast_(need_attn=True)
    check(model, dictionary, GraphCache(), [sentences([9, 6]), sentences([30, 25])], min_len=200, max_len_b=300)


@pytest.mark.parametrize("capture", [record, unchanged])
def test_captured_searches(build, architecture, sentences, dictionary, capture) -> None:
    """Set-up and step of the first batch are repeated for other batches, so they have no constants of the first one."""
    model, made = build(architecture).double(), GraphCache(capture, unchanged)
    model.make_generation_fast_(need_attn=True)
    batches = [sentences(lengths) for lengths in SHAPES]
    check(model, dictionary, made, batches, max_len_b=7)
    for parameter in model.parameters():
        parameter.data.mul_(0.9)
    check(model, dictionary, made, batches[1:], max_len_b=7)
    assert len(made.entries) == 1
    words = Candidates(torch.randint(20, 44, (len(dictionary), 1)), torch.arange(len(dictionary)) < 20)
    for source in batches:
        options = {"candidates": words, "beam_size": BEAM, "max_len_b": 7}
        actual = generate(FastBeamSearch, [model], dictionary, source, graphs=made, **options)
        assert_same(actual, generate(FastBeamSearch, [model], dictionary, source, **options), tolerance=2e-6)
    assert len(made.entries) == 2


def test_the_state_of_a_family_in_a_user_directory_is_copied() -> None:
    """The classes of the family belong to another package than the plugin's."""

    class Layer:
        def __init__(self, value: float) -> None:
            self.state = torch.tensor(value)

    class Decoding(StepwiseDecoding):
        def __init__(self, value: float) -> None:
            self.layers, self.caches = [Layer(value)], {"keys": torch.tensor(value)}

    new, old = Decoding(1.0), Decoding(0.0)
    copy_tensors_(new, old)
    assert [*tensors_of(old)] == [1.0, 1.0]


def test_the_cache_of_captured_searches(build, sentences, dictionary, monkeypatch) -> None:
    """The cache has one entry for each model, shape and mode, and drops the least recently used entry."""
    made, captured = GraphCache(lambda run: captured.append(run) or run, unchanged), []
    models = [build("convs2s_tiny", seed) for seed in (1, 2)]
    for model in models:
        model.make_generation_fast_(need_attn=True)

    def search(model: Any, length: int = 5, **options: Any) -> int:
        before = len(captured)
        generate(FastBeamSearch, [model], dictionary, sentences([length]), graphs=made, max_len_b=4, **options)
        return (len(captured) - before) // 2  # set-up and step

    assert [search(model) for model in (*models, *models)] == [1, 1, 0, 0]
    assert [search(models[0], beam_size=beam) for beam in (1, 2, 1, 2)] == [1, 1, 0, 0]
    for option in ("temperature", "word_penalty"):
        assert [search(models[0], **{option: each}) for each in (2.0, 3.0, 2.0)] == [1, 1, 0]
    models[0].decoder.need_attn = False
    assert search(models[0]) == 1
    models[0].decoder.to_embedding.weight.data = models[0].decoder.to_embedding.weight * 2
    assert search(models[0]) == 1, "a weight has another address"
    models[0].decoder.dropout.make_generation_fast_("", retain_dropout=True)
    assert search(models[0]) == 1, "dropout is on"
    monkeypatch.setattr(graphs, "MAX_ENTRIES", 3)
    assert [search(models[1], beam_size=beam) for beam in (1, 2, 3, 1, 4, 1, 2)] == [1, 1, 1, 0, 1, 0, 1]
    assert len(made.entries) == 3
    assert copy.deepcopy(made).entries == {}


def test_searches_that_are_not_compiled(build, sentences, dictionary, caplog) -> None:
    """Models in training are not compiled, nor are sources beyond the model's positions: the host must count tokens."""
    made = GraphCache(unchanged, unchanged)
    model = build("convs2s_tiny")
    check(model.double(), dictionary, made, [sentences([9, 6])])
    model.make_generation_fast_(need_attn=True)
    wide = torch.nn.functional.pad(sentences([60, 5]), (6, 0), value=1)
    check(model, dictionary, made, [wide])
    assert not made.entries
    check(model, dictionary, made, [wide[:, 5:], sentences([60, 60])])
    assert len(made.entries) == 1
    assert not caplog.text
    generate(FastBeamSearch, [model, model], dictionary, wide, graphs=made)
    assert "--compile-steps" in caplog.text


@needs_compiler
def test_the_compiler_does_not_see_reordering(build, architecture, sentences, dictionary) -> None:
    """torch 2.6 to 2.9 may read re-ordered rows of a state after overwriting them."""
    seen: list[Any] = []  # operators after torch's decomposition

    def look(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        return aot_autograd(fw_compiler=look_again)(graph, inputs)

    def look_again(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        orders = [node for node in graph.graph.nodes if node.target == torch.ops.fairseq_plugins.reorder_rows.default]
        seen.append([user.target for order in {node.args[1] for node in orders} for user in order.users])
        return make_boxed_func(graph.forward)

    made = GraphCache(compile_step=lambda step: torch.compile(step, fullgraph=True, dynamic=False, backend=look))
    model = build(architecture).double()
    model.make_generation_fast_(need_attn=True)
    check(model, dictionary, made, [sentences([9, 6])], max_len_b=5)
    (users,) = seen
    assert users
    assert set(users) == {torch.ops.fairseq_plugins.reorder_rows.default, torch.ops.aten.copy.default}
