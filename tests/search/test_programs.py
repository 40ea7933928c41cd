"""A search by programs is the search: one program for a shape, no number baked in or looked at, and little else."""

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

from fairseq_plugins.cpu.packing import PackedWeightCache
from fairseq_plugins.search import graphs
from fairseq_plugins.search.beam_search import TokenRules
from fairseq_plugins.search.generator import FastBeamSearch
from fairseq_plugins.search.graphs import GraphCache, Run, copy_tensors_, tensors_of
from fairseq_plugins.vocabulary.candidates import Candidates
from tests.search.searching import assert_same, generate

BEAM = 3
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler: g++")
# Of up to four sentences of up to 32 words.
SHAPES = [[9, 6, 3, 1], [4, 4, 2], [32, 32, 5, 4]]
PREFIX = torch.tensor([[7, 8], [10, 1], [12, 2]])


def as_it_is(step: Any) -> Any:
    return step


def recorded(run: Run) -> Run:
    """The operators of one run, which are repeated in the same memory: as a CUDA graph does."""
    graph: Run = make_fx(run)()
    return graph


def check(model: Any, dictionary: Any, made: GraphCache, batches: list[Tensor], **options: Any) -> None:
    """Searches in double precision, so fairseq's, with rules that change from batch to batch."""
    for number, source in enumerate(batches):
        own = {"beam_size": BEAM, "max_len_b": 20 - number, "min_len": number, "unk_penalty": number, **options}
        if len(source) == len(PREFIX):
            own["prefix_tokens"] = PREFIX
        with torch.inference_mode(number % 2 == 0):
            actual = generate(FastBeamSearch, [model], dictionary, source, graphs=made, **own)
        assert_same(actual, generate(SequenceGenerator, [model], dictionary, source, **own), tolerance=2e-6)


@needs_compiler
def test_compiled_searches(build, architecture, sentences, dictionary) -> None:
    """Batches, weights and generators share a program."""
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
def test_compiled_searches_among_candidates(build, sentences, dictionary, precision: str) -> None:
    """Of each batch its own, greedily, with packed weights; nobody looks at the attention."""
    model = build("convs2s_tiny")
    model.make_generation_fast_()
    words = Candidates(torch.randint(20, 44, (len(dictionary), 1)), torch.arange(len(dictionary)) < 20)
    options = {"candidates": words, "beam_size": 1, "max_len_b": 20}
    made, packing = GraphCache(), PackedWeightCache(precision)
    # In int8 the rounding of inputs depends on all of a batch, and so on the words that are added to it.
    batches = [sentences([length]) for length in ((9, 9, 32, 3) if precision == "float32" else (32, 32, 32, 32))]
    for number, source in enumerate(batches):
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            actual = generate(FastBeamSearch, [model], dictionary, source, graphs=made, packing=packing, **options)
        expected = generate(
            FastBeamSearch, [model], dictionary, source, packing=PackedWeightCache(precision), **options
        )
        assert_same(actual, expected, tolerance=1e-4 if precision == "float32" else 0.1)


@needs_compiler
@pytest.mark.slow
def test_long_compiled_searches(build, architecture, sentences, dictionary) -> None:
    """Where state grows."""
    model = build(architecture, max_target_positions=500).double()
    model.make_generation_fast_(need_attn=True)
    check(model, dictionary, GraphCache(), [sentences([9, 6]), sentences([30, 25])], min_len=200, max_len_b=300)


@pytest.mark.parametrize("capture", [recorded, as_it_is])
def test_searches_in_the_memory_of_others(build, architecture, sentences, dictionary, capture) -> None:
    """What was recorded of the first batch's set-up and step makes the others: nothing that changes is baked in."""
    model, made = build(architecture).double(), GraphCache(capture, as_it_is)
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


def test_one_table_of_memory(build, sentences, dictionary, monkeypatch) -> None:
    """Of models, shapes and modes, the least recently used going first; one that comes again is not made again."""
    made, captured = GraphCache(lambda run: captured.append(run) or run, as_it_is), []
    models = [build("convs2s_tiny", seed) for seed in (1, 2)]
    for model in models:
        model.make_generation_fast_(need_attn=True)

    def search(model: Any, length: int = 5, **options: Any) -> int:
        before = len(captured)
        generate(FastBeamSearch, [model], dictionary, sentences([length]), graphs=made, max_len_b=4, **options)
        return (len(captured) - before) // 2  # its set-up and its step

    assert [search(model) for model in (*models, *models)] == [1, 1, 0, 0]
    assert [search(models[0], beam_size=beam) for beam in (1, 2, 1, 2)] == [1, 1, 0, 0]
    assert [search(models[0], temperature=each, word_penalty=each) for each in (2.0, 1.0, 2.0)] == [1, 1, 0]
    models[0].decoder.need_attn = False
    assert search(models[0]) == 1
    models[0].decoder.to_embedding.weight.data = models[0].decoder.to_embedding.weight * 2
    assert search(models[0]) == 1, "a weight lies elsewhere"
    monkeypatch.setattr(graphs, "MAX_ENTRIES", 3)
    assert [search(models[1], beam_size=beam) for beam in (1, 2, 3, 1, 4, 1, 2)] == [1, 1, 1, 0, 1, 0, 1]
    assert len(made.entries) == 3
    assert copy.deepcopy(made).entries == {}


def test_a_weight_that_lies_elsewhere(build, sentences, dictionary) -> None:
    """What was its memory may be somebody else's by now."""
    model, made, source = build("weighted_transformer_tiny").double(), GraphCache(as_it_is, as_it_is), sentences([5, 3])
    check(model, dictionary, made, [source])
    before = [(each, each.data, each.clone()) for each in model.parameters()]
    for parameter, *_ in before:
        parameter.data = parameter * 1.1
    check(model, dictionary, made, [source])
    assert all(torch.equal(old, value) for _, old, value in before)


def test_what_is_not_searched_by_programs(build, sentences, dictionary, caplog) -> None:
    """In the middle of training, and sources beyond the model's positions, of which the host has to count the words."""
    made = GraphCache(as_it_is, as_it_is)
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
def test_no_compiler_sees_how_rows_move(build, architecture, sentences, dictionary) -> None:
    """It might read moved rows of a state where it has written the next ones: torch 2.6 to 2.9 do."""
    seen: list[Any] = []  # what is left where compilers have taken apart what they know

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


@torch.no_grad()
def test_programs_look_at_no_number(build, architecture, dictionary) -> None:
    """Neither set-up nor step: tensors without numbers raise where one is asked for, or where they meet others."""
    model = build(architecture).to("meta")
    model.make_generation_fast_(need_attn=True)
    search = FastBeamSearch([model], dictionary, beam_size=BEAM, max_len_b=9)
    source = torch.zeros(2, 5, dtype=torch.long, device="meta")
    for words in (None, torch.zeros(40, dtype=torch.long, device="meta")):
        rules = TokenRules.from_generator(search, source, source[:, :2])._replace(words=words)
        beams, new = (search.begin({"src_tokens": source}, rules, capacity=32) for _ in range(2))
        copy_tensors_(new, beams)
        for _ in range(2):
            beams.step()
        assert {part.device.type for part in tensors_of(beams)} == {"meta"}
