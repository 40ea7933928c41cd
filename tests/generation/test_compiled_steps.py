"""Compiled steps are the steps: the same translations, one program for a shape, no number baked in or looked at."""

from __future__ import annotations

import copy
import shutil
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

from fairseq_plugins.generation import compiled_steps
from fairseq_plugins.generation.beam_search import FastBeamSearch
from fairseq_plugins.generation.candidates import Candidates
from fairseq_plugins.generation.compiled_steps import CompiledSteps, take_over, tensors_of
from fairseq_plugins.generation.search import CandidateSearch
from fairseq_plugins.models.incremental import StepwiseDecoding
from fairseq_plugins.nn.source import Source

BEAM = 3
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler: g++")


def translate(generator: SequenceGenerator, source: torch.Tensor) -> list[list[dict[str, torch.Tensor]]]:
    lengths = source.ne(1).sum(dim=1)
    return generator.generate(generator.model.models, {"net_input": {"src_tokens": source, "src_lengths": lengths}})


def assert_same(expected: Any, actual: Any) -> None:
    assert [len(beams) for beams in expected] == [len(beams) for beams in actual]
    for one, other in zip(chain(*expected), chain(*actual), strict=True):
        assert one["tokens"].tolist() == other["tokens"].tolist()
        torch.testing.assert_close(one["positional_scores"], other["positional_scores"], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(one["attention"], other["attention"], rtol=1e-4, atol=1e-5)


def check_searches(model: Any, dictionary: Any, batches: list[torch.Tensor], steps: int, beam: int = BEAM) -> None:
    """The first batch compiles, the others are of its shape.

    Those in double precision are compared with fairseq's, others with ours, whose products round alike.
    """
    options = {"beam_size": beam, "max_len_b": steps}
    compiled = FastBeamSearch([model], dictionary, compiled=CompiledSteps(), **options)
    is_double = next(model.parameters()).dtype == torch.float64
    expected = (SequenceGenerator if is_double else FastBeamSearch)([model], dictionary, **options)
    assert_same(translate(expected, batches[0]), translate(compiled, batches[0]))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in batches[1:]:
            assert_same(translate(expected, batch), translate(compiled, batch))


@needs_compiler
def test_translations_are_the_same(build, architecture, sentences, dictionary) -> None:
    """Up to four sentences of up to 32 words are of one shape."""
    model = build(architecture)
    model.make_generation_fast_(need_attn=True)
    batches = [[9, 6, 3, 1], [4, 4, 2], [32, 32, 5, 4]]
    check_searches(model, dictionary, [sentences(lengths) for lengths in batches], 20)


@needs_compiler
def test_one_sentence_and_one_hypothesis(build, architecture, sentences, dictionary) -> None:
    """Tensors of one element, whose strides may be anything; nobody looks at the attention."""
    model = build(architecture).double()
    model.make_generation_fast_()
    check_searches(model, dictionary, [sentences([9]), sentences([5]), sentences([32])], 20, beam=1)


@needs_compiler
def test_other_weights_and_another_generator(build, architecture, sentences, dictionary) -> None:
    """From the same program."""
    model, source = build(architecture), sentences([9, 6])
    model.make_generation_fast_()
    options = {"beam_size": BEAM, "max_len_b": 5}
    steps = CompiledSteps()
    translate(FastBeamSearch([model], dictionary, compiled=steps, **options), source)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for factor in (1, 1.01):
            for parameter in model.parameters():
                parameter.data.mul_(factor)
            compiled = FastBeamSearch([model], dictionary, compiled=steps, **options)
            assert_same(translate(FastBeamSearch([model], dictionary, **options), source), translate(compiled, source))


@needs_compiler
def test_candidates(build, sentences, dictionary) -> None:
    """Of each batch its own, from the same program."""
    model = build("convs2s_tiny")
    model.make_generation_fast_()
    always = torch.arange(len(dictionary)) < 20
    words = Candidates(torch.randint(20, 44, (len(dictionary), 1)), always)
    options = {"candidates": words, "beam_size": 1, "max_len_b": 20}
    expected = CandidateSearch([model], dictionary, **options)
    compiled = CandidateSearch([model], dictionary, compiled=CompiledSteps(), **options)
    translate(compiled, sentences([9]))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in (sentences([9]), sentences([32]), sentences([3])):
            assert_same(translate(expected, batch), translate(compiled, batch))


def test_what_is_not_compiled(build, sentences, dictionary, caplog, monkeypatch) -> None:
    """In the middle of training, and after too many shapes: the same translations without."""
    monkeypatch.setattr(compiled_steps, "_SHAPES", 1)
    monkeypatch.setattr(compiled_steps, "_compiled", None)
    model = build("convs2s_tiny")
    check_searches(model, dictionary, [sentences([9, 6]), sentences([33])], 5)
    model.make_generation_fast_()
    steps = CompiledSteps()
    encoded = model.encoder(sentences([9, 6]))
    assert steps.start(model.decoder, encoded, BEAM, 9) is not None
    assert steps.start(model.decoder, model.encoder(sentences([33])), BEAM, 9) is None
    assert "after 1 shapes of batches no other is compiled" in caplog.text
    assert steps.start(model.decoder, encoded, BEAM, 9) is not None


@torch.no_grad()
@pytest.mark.parametrize(
    ("given", "made"),
    [((1, 1), (1, 32)), ((2, 32), (2, 32)), ((3, 33), (4, 64)), ((4, 64), (4, 64)), ((5, 9), (8, 32))],
)
def test_shapes(build, sentences, given: tuple[int, int], made: tuple[int, int]) -> None:
    """Sentences up to a power of two, lengths to a multiple of 32."""
    model = build("convs2s_tiny")
    model.make_generation_fast_()
    encoded = model.encoder(sentences([given[1]] * given[0]))
    assert CompiledSteps().start(model.decoder, encoded, BEAM, 9).decoding.source.padding_mask.shape == made


@torch.no_grad()
def test_how_many_shapes(build, sentences) -> None:
    """32; one for each number of hypotheses.  torch has to keep a program of each."""
    model, steps = build("convs2s_tiny"), CompiledSteps()
    model.make_generation_fast_()
    encoded = model.encoder(sentences([9]))
    config = torch._dynamo.config
    with config.patch(cache_size_limit=8, accumulated_cache_size_limit=8):  # other tests have raised them
        started = [steps.start(model.decoder, encoded, beam, 9) for beam in range(1, 34)]
        assert min(config.cache_size_limit, config.accumulated_cache_size_limit) >= 32
    assert [each is not None for each in started] == [True] * 32 + [False]


@pytest.mark.parametrize(("min_len", "room"), [(1, 32), (7, 32), (7, 3)])
def test_every_step_is_the_program(
    build, architecture, sentences, dictionary, monkeypatch, min_len: int, room: int
) -> None:
    """Here one that was not compiled; as many are made as room was asked for, where no hypothesis ends before.

    While there is room all stays in its place.
    """
    asked, made, places, start = [], [], set(), CompiledSteps.start

    def advance(decoding: StepwiseDecoding, *step: torch.Tensor) -> Any:
        made.append(step)
        places.add(tuple(tensor.data_ptr() for tensor in tensors_of(decoding)))
        return decoding.advance(*step)

    monkeypatch.setattr(compiled_steps, "_LENGTHS", room)
    monkeypatch.setattr(compiled_steps, "_compiled", lambda on_gpu: advance)
    monkeypatch.setattr(CompiledSteps, "start", lambda *args, steps: asked.append(steps) or start(*args, steps))
    model, source = build(architecture), sentences([9, 6, 3])
    model.make_generation_fast_(need_attn=True)
    options = {"beam_size": BEAM, "min_len": min_len, "max_len_b": 7}
    compiled = FastBeamSearch([model], dictionary, compiled=CompiledSteps(), **options)
    assert_same(translate(SequenceGenerator([model], dictionary, **options), source), translate(compiled, source))
    assert asked == [len(made)] or min_len == 1
    assert len(places) == 1 or room == 3


def test_no_compiler_sees_how_rows_move(build, architecture, sentences, dictionary, monkeypatch) -> None:
    """It might read moved rows of a state where it has written the next ones: torch 2.6 to 2.9 do."""
    users: list[Any] = []
    left: list[Any] = []  # where compilers have taken apart what they know

    def look(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        (order,) = graph.graph.find_nodes(op="placeholder", target="L_order_")
        users.extend(user.target for user in order.users)
        return aot_autograd(fw_compiler=look_again)(graph, inputs)

    def look_again(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        left.extend(node.target for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    advance = torch.compile(StepwiseDecoding.advance, fullgraph=True, dynamic=False, backend=look)
    monkeypatch.setattr(compiled_steps, "_compiled", lambda on_gpu: advance)
    model = build(architecture)
    model.make_generation_fast_()
    check_searches(model, dictionary, [sentences([9, 6])], 5)
    assert set(users) == {torch.ops.fairseq_plugins.moved}
    assert left.count(torch.ops.fairseq_plugins.moved.default) == len(users)


@torch.no_grad()
def test_a_batch_is_where_its_source_is(build, architecture, sentences, monkeypatch) -> None:
    """Tensors without numbers do not go together with others."""
    monkeypatch.setattr(compiled_steps, "_compiled", lambda on_gpu: StepwiseDecoding.advance)
    model = build(architecture).to("meta")
    model.make_generation_fast_(need_attn=True)
    encoded = model.encoder(sentences([5, 3, 4]).to("meta"))
    decoding = CompiledSteps().start(model.decoder, encoded, BEAM, 9)
    words = sentences([9] * 3 * BEAM).to("meta")
    for length in (1, 2):
        logits, extra = decoding.decode(words[:, :length])
        decoding.order.reorder(torch.empty(3 * BEAM, dtype=torch.long, device="meta"))
    assert (logits.shape, logits.device.type) == ((3 * BEAM, 1, 44), "meta")
    assert extra["attn"][0].shape == (3 * BEAM, 1, 5)


def test_what_is_done_on_a_gpu(build, architecture, sentences, dictionary, monkeypatch) -> None:
    """Here a pretended one: programs with graphs, and batches in the memory of the first, with room for all steps."""
    graphs, rooms, started = [], [], CompiledSteps()

    def advance(decoding: StepwiseDecoding, *step: torch.Tensor) -> Any:
        rooms.append(decoding.room)
        return decoding.advance(*step)

    monkeypatch.setattr(compiled_steps, "_compiled", lambda on_gpu: graphs.append(on_gpu) or advance)
    model = build(architecture).double()
    model.make_generation_fast_(need_attn=True)
    options = {"beam_size": BEAM, "max_len_b": 40}
    expected = SequenceGenerator([model], dictionary, **options)
    compiled = FastBeamSearch([model], dictionary, compiled=started, **options)
    for batch in (sentences([9, 6, 3]), sentences([4, 4, 2, 2])):
        with monkeypatch.context() as on_gpu:
            on_gpu.setattr(torch.Tensor, "is_cuda", True)
            actual = translate(compiled, batch)
        assert_same(translate(expected, batch), actual)
    assert set(graphs) == {True}
    assert set(rooms) in ({64}, {None})
    assert len(started._captured) == 1


@needs_compiler
@pytest.mark.slow
def test_long_translations_are_the_same(build, architecture, sentences, dictionary) -> None:
    model = build(architecture, max_target_positions=500)
    model.make_generation_fast_(need_attn=True)
    check_searches(model, dictionary, [sentences([9, 6]), sentences([30, 25])], 300)


def decoding_of(model: Any, source: torch.Tensor, steps: int) -> tuple[Source, StepwiseDecoding]:
    encoded = model.encoder(source)
    rows = torch.arange(len(source) * BEAM, device=source.device) // BEAM
    return encoded, model.decoder.start(encoded.reorder(rows), room=steps)


def run(step: Any, words: torch.Tensor) -> list[torch.Tensor]:
    """Features and attention of each step; rows move before every step but the first."""
    results: list[torch.Tensor] = []
    order, unmoved = (torch.tensor(list(rows), device=words.device) for rows in (ORDER, range(len(ORDER))))
    for number, tokens in enumerate(words.unbind(dim=1)):
        results += [part.clone() for part in step(tokens, order if number else unmoved)]
    return results


ORDER = [1, 1, 0, 5, 3, 3]  # of 2 sentences with 3 rows each


@torch.no_grad()
def test_nothing_that_changes_is_baked_in(build, architecture, sentences) -> None:
    """One step, traced once, makes all of them."""
    model, source, words = build(architecture).double(), sentences([5, 3]), sentences([9] * 2 * BEAM)
    _, expected = decoding_of(model, source, 9)
    _, decoding = decoding_of(model, source, 9)
    before = [(tensor, tensor.clone()) for tensor in tensors_of(decoding)]
    traced = make_fx(partial(StepwiseDecoding.advance, decoding))(
        words[:, 0], torch.tensor(ORDER, device=words.device)
    )  # which makes it, too
    for tensor, value in before:
        tensor.copy_(value)
    for one, other in zip(run(expected.advance, words), run(traced, words), strict=True):
        torch.testing.assert_close(one, other)


@torch.no_grad()
def test_a_step_looks_at_no_number(build, architecture, sentences) -> None:
    """Tensors without numbers raise where one is asked for."""
    model = build(architecture)
    encoded = model.encoder(sentences([5, 3])).reorder(torch.arange(2).repeat_interleave(BEAM))
    empty = Source(*(part.to("meta") for part in (encoded.keys, encoded.values, encoded.padding_mask, encoded.rows)))
    decoding = model.to("meta").decoder.start(empty, room=9)
    for _ in range(2):
        features, attention = decoding.advance(
            torch.empty(2 * BEAM, dtype=torch.long, device="meta"), torch.tensor(ORDER).to("meta")
        )
    assert (features.device.type, attention.shape) == ("meta", (2 * BEAM, 5))


@torch.no_grad()
def test_a_batch_in_the_memory_of_another(build, architecture, sentences) -> None:
    """What a captured graph reads and writes is there, and is the new batch."""
    model, words = build(architecture).double(), sentences([9] * 2 * BEAM)
    model.make_generation_fast_(need_attn=True)
    _, first = decoding_of(model, sentences([5, 3]), 9)
    places = [tensor.data_ptr() for tensor in tensors_of(first)]
    run(first.advance, words)
    for parameter in model.parameters():
        parameter.mul_(0.9)
    _, expected = decoding_of(model, sentences([2, 5]), 9)
    _, second = decoding_of(model, sentences([2, 5]), 9)
    assert take_over(first, second)
    assert [tensor.data_ptr() for tensor in tensors_of(first)] == places
    mine, theirs = run(first.advance, words), run(expected.advance, words)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(first.output_layer(mine[-2]), expected.output_layer(theirs[-2]))


@torch.no_grad()
def test_the_memory_of_a_shape_is_kept(build, architecture, sentences) -> None:
    """What is done on a GPU: batches of one shape in one place, as torch is told, and of the last eight shapes."""
    model, steps, source = build(architecture).double(), CompiledSteps(), sentences([5, 3])
    model.make_generation_fast_(need_attn=True)
    first, second = (steps.captured(decoding_of(model, source, 9)[1]) for _ in range(2))
    assert first is second
    assert {torch._dynamo.utils.get_static_address_type(tensor) for tensor in tensors_of(first)} == {"unguarded"}
    assert (steps.captured(decoding_of(model, source, 64)[1]) is first) == (first.room is None)
    assert steps.captured(decoding_of(build(architecture, 2).double(), source, 9)[1]) is not first
    for length in range(1, 20):
        steps.captured(decoding_of(model, sentences([length]), 9)[1])
    assert len(steps._captured) == 8
    assert copy.deepcopy(steps)._captured == {}


@torch.no_grad()
def test_weights_that_have_moved_are_not_overwritten(build, sentences) -> None:
    """A parameter's memory is elsewhere by now: what was its may be somebody else's."""
    model = build("convs2s_tiny").double()
    model.make_generation_fast_(need_attn=True)
    _, first = decoding_of(model, sentences([5, 3]), 9)
    before = {name: (parameter.data, parameter.clone()) for name, parameter in model.decoder.named_parameters()}
    for parameter in model.parameters():
        parameter.data = parameter * 2
    _, second = decoding_of(model, sentences([5, 3]), 9)
    assert not take_over(first, second)
    assert all(torch.equal(old, value) for old, value in before.values())


@torch.no_grad()
def test_what_compiled_steps_refuse(build, sentences, monkeypatch) -> None:
    monkeypatch.setattr(compiled_steps, "_compiled", lambda on_gpu: StepwiseDecoding.advance)
    model = build("conv_encoder_tiny")
    source, words, state = sentences([5, 3]), sentences([9] * 2 * BEAM), {}
    encoded = model.encoder(source)
    model.decoder.begin(state, CompiledSteps().start(model.decoder, encoded, BEAM, 9))
    with pytest.raises(ValueError, match=r"^compiled steps are made one by one: 0 were made, 2 tokens are given$"):
        model.decoder(words[:, :2], encoded, incremental_state=state)
    model.decoder(words[:, :1], encoded, incremental_state=state)
    model.decoder.reorder_incremental_state(state, torch.arange(BEAM))
    with pytest.raises(RuntimeError, match=r"^compiled steps keep the rows of sentences that have ended$"):
        model.decoder(words[:, :2], encoded, incremental_state=state)


class Doubling:
    """A decoding whose steps are quickly compiled."""

    def __init__(self, breaks: bool = False) -> None:
        self.breaks = breaks
        self.position = torch.zeros(1, dtype=torch.long)

    def step(self, tokens: torch.Tensor, order: torch.Tensor) -> tuple[torch.Tensor, None]:
        if self.breaks:
            torch._dynamo.graph_break()
        return 2 * tokens[order], None

    advance = StepwiseDecoding.advance


@needs_compiler
@pytest.mark.parametrize("captures", [False, True])
def test_how_steps_are_compiled(captures: bool) -> None:
    """For each shape anew, in one piece; into graphs where it is to be so, which torch counts that it cannot here."""
    torch._dynamo.reset()
    compiled_steps._compiled.cache_clear()
    torch._dynamo.utils.counters.clear()
    for rows in (2, 3, 4, 3):
        tokens, order = torch.arange(rows), torch.arange(rows).flip(0)
        features, _ = compiled_steps._compiled(captures)(Doubling(), tokens, order)
        assert features.tolist() == (2 * tokens.flip(0)).tolist()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3
    assert (torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] > 0) == captures
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled_steps._compiled(captures)(Doubling(breaks=True), tokens, order)
