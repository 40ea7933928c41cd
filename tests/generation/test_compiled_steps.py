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
    """The first batch compiles, the others are of its shape."""
    options = {"beam_size": beam, "max_len_b": steps}
    compiled = FastBeamSearch([model], dictionary, compiled=CompiledSteps(), **options)
    expected = SequenceGenerator([model], dictionary, **options)
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
    model = build(architecture)
    model.make_generation_fast_()
    check_searches(model, dictionary, [sentences([9]), sentences([5]), sentences([32])], 20, beam=1)


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
    check_searches(model, dictionary, [sentences([9, 6]), sentences([40])], 5)
    model.make_generation_fast_()
    steps = CompiledSteps()
    encoded = model.encoder(sentences([9, 6]))
    assert steps.start(model.decoder, encoded, BEAM, 9) is not None
    assert steps.start(model.decoder, model.encoder(sentences([40])), BEAM, 9) is None
    assert "after 1 shapes of batches no other is compiled" in caplog.text
    assert steps.start(model.decoder, encoded, BEAM, 9) is not None


@pytest.mark.parametrize("min_len", [1, 7])
def test_every_step_is_the_program(build, architecture, sentences, dictionary, monkeypatch, min_len: int) -> None:
    """Here one that was not compiled; as many are made as room was asked for, where no hypothesis ends before."""
    asked, made, start = [], [], CompiledSteps.start

    def advance(decoding: StepwiseDecoding, *step: torch.Tensor) -> Any:
        made.append(step)
        return decoding.advance(*step)

    monkeypatch.setattr(compiled_steps, "_compiled", lambda on_gpu: advance)
    monkeypatch.setattr(CompiledSteps, "start", lambda *args, steps: asked.append(steps) or start(*args, steps))
    model, source = build(architecture), sentences([9, 6, 3])
    model.make_generation_fast_(need_attn=True)
    options = {"beam_size": BEAM, "min_len": min_len, "max_len_b": 7}
    compiled = FastBeamSearch([model], dictionary, compiled=CompiledSteps(), **options)
    assert_same(translate(SequenceGenerator([model], dictionary, **options), source), translate(compiled, source))
    assert asked == [len(made)] or min_len == 1


@needs_compiler
@pytest.mark.slow
def test_long_translations_are_the_same(build, architecture, sentences, dictionary) -> None:
    model = build(architecture, max_target_positions=500)
    model.make_generation_fast_(need_attn=True)
    check_searches(model, dictionary, [sentences([9, 6]), sentences([30, 25])], 300)


def decoding_of(model: Any, source: torch.Tensor, steps: int) -> tuple[Source, StepwiseDecoding]:
    encoded = model.encoder(source)
    rows = torch.arange(len(source) * BEAM, device=source.device) // BEAM
    return encoded, model.decoder.start(encoded.reorder(rows), len(rows), room=steps)


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
    decoding = model.to("meta").decoder.start(empty, 2 * BEAM, room=9)
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
    for one, other in zip(run(expected.advance, words), run(first.advance, words), strict=True):
        torch.testing.assert_close(one, other)


@torch.no_grad()
def test_the_memory_of_a_shape_is_kept(build, architecture, sentences) -> None:
    """What is done on a GPU: batches of one shape in one place, and of the last eight shapes."""
    model, steps, source = build(architecture).double(), CompiledSteps(), sentences([5, 3])
    model.make_generation_fast_(need_attn=True)
    first, second = (steps.captured(decoding_of(model, source, 9)[1]) for _ in range(2))
    assert first is second
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


@needs_compiler
@torch.no_grad()
def test_what_compiled_steps_refuse(build, sentences) -> None:
    model = build("conv_encoder_tiny")
    source, words, state = sentences([5, 3]), sentences([9] * 2 * BEAM), {}
    encoded = model.encoder(source)
    model.decoder.begin(state, CompiledSteps().start(model.decoder, encoded, BEAM, 9))
    with pytest.raises(ValueError, match="one by one: 0 were made, 2 tokens are given"):
        model.decoder(words[:, :2], encoded, incremental_state=state)
    model.decoder(words[:, :1], encoded, incremental_state=state)
    model.decoder.reorder_incremental_state(state, torch.arange(BEAM))
    with pytest.raises(RuntimeError, match="keep the rows of sentences that have ended"):
        model.decoder(words[:, :2], encoded, incremental_state=state)
