"""This plugin's beam search, compared with fairseq's."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from fairseq.models import FairseqDecoder
from fairseq.sequence_generator import EnsembleModel, SequenceGenerator, SequenceGeneratorWithAlignment
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fairseq_plugins.cpu.packing import PackedWeightCache
from fairseq_plugins.search.beam_search import TokenRules, best_words
from fairseq_plugins.search.generator import FastBeamSearch, FastBeamSearchWithAlignment
from fairseq_plugins.search.graphs import copy_tensors_, tensors_of
from tests import searches
from tests.common.test_generation import without_state
from tests.conftest import ARCHITECTURES
from tests.search.searching import LENGTHS, MODES, Model, assert_same, fairseq_model, generate

# A beam of k uses the best 2k words of each hypothesis; there are 44 words.
MODES = {**MODES, "wide as half of the words": {"beam_size": 21}, "wider than half of the words": {"beam_size": 23}}
MODES["wide as all words"] = {"beam_size": 60, "max_len_b": 4}


@pytest.mark.parametrize("mode", MODES)
def test_the_fast_search(model: Model, dictionary, sentences, mode: str) -> None:
    source = sentences(LENGTHS, left_pad=True)
    actual = generate(FastBeamSearch, [model()], dictionary, source, **MODES[mode])
    assert_same(actual, generate(SequenceGenerator, [model()], dictionary, source, **MODES[mode]), tolerance=2e-6)


@pytest.mark.usefixtures("steps_of_convolutions")
@pytest.mark.parametrize("beam", [1, 4])
def test_in_single_precision(model: Model, dictionary, sentences, beam: int) -> None:
    """Products are packed, and two batches share the cache; rounding errors depend on the number of rows."""
    source, options = sentences(LENGTHS, left_pad=True), {"beam_size": beam, "weight_cache": PackedWeightCache()}
    for _ in range(2):
        actual = generate(FastBeamSearch, [model().float()], dictionary, source, **options)
        expected = generate(SequenceGenerator, [model().float()], dictionary, source, beam_size=beam)
        assert_same(actual, expected, tolerance=2e-5)


PLAIN = ["beam", "greedy", "wide beam", "short", "length from the source", "minimum length", "suppressed words"]
PLAIN += ["another first word", "penalty on unknown words", "as long as positions allow", "no words", "no least length"]
PLAIN += [mode for mode in MODES if mode.startswith(("wide", "prefix"))]


@pytest.mark.parametrize("mode", MODES)
def test_modes_that_are_left_to_fairseq(build, dictionary, sentences, monkeypatch, mode: str) -> None:
    """If fairseq searched in all modes, `test_the_fast_search` would compare fairseq with itself."""
    left = []
    monkeypatch.setattr(SequenceGenerator, "_generate", lambda *_: left.append(mode) or [])
    generate(FastBeamSearch, [build(ARCHITECTURES[0])], dictionary, sentences(LENGTHS), **MODES[mode])
    assert left == ([] if mode in PLAIN else [mode])


class LaterWords(FairseqDecoder):
    """A language model that ignores its input, and gives later words of the dictionary higher probabilities."""

    def forward(self, prev_output_tokens: Tensor, *_: Any) -> Any:
        scores = torch.linspace(0, 5, len(self.dictionary), device=prev_output_tokens.device)
        return scores.expand(*prev_output_tokens.shape, -1), None


def with_own_probabilities(model: Any) -> Any:
    class Own(type(model)):  # type: ignore[misc]
        def get_normalized_probs(self, decoder_out: Any, log_probs: bool, sample: Any) -> Tensor:
            lprobs = super().get_normalized_probs(decoder_out, log_probs, sample)
            lprobs[..., 20] += 20
            return lprobs

    model.__class__ = Own
    return model


EXCEPTIONS = ["length of the source", "language model", "no state", "adaptive softmax", "own probabilities"]


@pytest.mark.parametrize("but_for", EXCEPTIONS)
def test_searches_with_one_unsupported_property(build, task, dictionary, sentences, but_for: str) -> None:
    """A search that fairseq has to do because of one property gives the same result as fairseq's own search."""
    models, source, options = [build(ARCHITECTURES[0]).double()], sentences(LENGTHS), {}
    match but_for:
        case "length of the source":
            options = {"match_source_len": True}
        case "language model":
            options = {"lm_model": LaterWords(dictionary)}
        case "no state":
            models, options = [without_state(models[0])], {"bos_token": 8}
        case "own probabilities":
            models = [with_own_probabilities(models[0])]
        case "adaptive softmax":
            models = [fairseq_model("transformer_tiny", task, adaptive_softmax_cutoff="10,20").to(source.device)]
    actual = generate(FastBeamSearch, models, dictionary, source, **options)
    assert_same(actual, generate(SequenceGenerator, models, dictionary, source, **options), tolerance=2e-6)


FORMS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "no more": lambda attention: (),
    "none": lambda attention: (None,),
    "a tensor": lambda attention: (attention,),
    "named": lambda attention: ({"attn": attention},),
    "a list of none": lambda attention: ({"attn": [None]},),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_in_which_decoders_return_their_attention(task, device, dictionary, sentences, form: str) -> None:
    model, source = fairseq_model("fconv", task).to(device).double(), sentences(LENGTHS, left_pad=True)
    forward = model.decoder.forward

    def formed(*args: Any, **kwargs: Any) -> Any:
        logits, attention = forward(*args, **kwargs)
        return logits, *FORMS[form](attention)

    model.decoder.forward = formed
    actual = generate(FastBeamSearch, [model], dictionary, source)
    assert_same(actual, generate(SequenceGenerator, [model], dictionary, source), tolerance=2e-6)


def test_a_model_in_half_precision(build, dictionary, sentences) -> None:
    """The softmax is in single precision, as in fairseq."""
    model, source = build(ARCHITECTURES[0]).half(), sentences(LENGTHS)
    actual = generate(FastBeamSearch, [model], dictionary, source, len_penalty=0.7)
    assert_same(actual, generate(SequenceGenerator, [model], dictionary, source, len_penalty=0.7), tolerance=2e-6)


class OneDevice(TorchDispatchMode):
    """Refuse operations on tensors of two devices, like a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [part for part in tree_leaves((args, kwargs)) if isinstance(part, Tensor) and part.dim()]
        assert len({tensor.device for tensor in tensors}) < 2 or "copy" in str(func), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("capacity", [None, 32])
@torch.no_grad()
def test_a_step_does_not_synchronise(build, architecture: str, dictionary, capacity: int | None) -> None:
    """Meta tensors have no values to read.  All tensors stay on the device of the source, even if sentences leave."""
    model, empty = build(architecture).to("meta"), partial(torch.empty, dtype=torch.long, device="meta")
    model.make_generation_fast_(need_attn=True)
    search, source = FastBeamSearch([model], dictionary, beam_size=2, word_penalty=1.0, max_len_b=5), empty(4, 5)
    rules = TokenRules.from_generator(search, source, empty(4, 2))._replace(words=empty(40) if capacity else None)
    with OneDevice():
        state, new = (search.begin({"src_tokens": source}, rules, capacity) for _ in range(2))
        copy_tensors_(new, state)
        for step in range(4):
            state.prepare_and_step()
            if step == 1 and not capacity:
                state.keep(empty(2))
    assert {part.device.type for part in tensors_of(state)} == {"meta"}
    assert state.finished.shape == (4 if capacity else 2,)


@pytest.mark.parametrize("with_candidates", [False, True])
def test_a_source_of_short_integers(model: Model, dictionary, some, sentences, with_candidates: bool) -> None:
    source, options = sentences(LENGTHS), {"prefix_tokens": torch.tensor([[7], [8], [9], [10]])}
    options["candidates"] = some if with_candidates else None
    expected = generate(FastBeamSearch, [model()], dictionary, source, **options)
    options["prefix_tokens"] = options["prefix_tokens"].int()
    actual = generate(FastBeamSearch, [model()], dictionary, source.int(), **options)
    assert_same(actual, expected, tolerance=0)
    assert {beam["tokens"].dtype for beam in chain(*actual)} == {torch.long}


@pytest.mark.parametrize("min_len", [0, 1, 3])
def test_fewer_possible_words_than_hypotheses(model: Model, dictionary, sentences, min_len: int) -> None:
    """Excluded words never occur, even if fewer than k hypotheses remain."""
    possible = {2, 9, 21}
    names = [dictionary[word] for word in range(len(dictionary)) if word not in possible and word != dictionary.unk()]
    options = {"tokens_to_suppress": names, "unk_penalty": math.inf, "min_len": min_len, "beam_size": 4}
    source = sentences(LENGTHS, left_pad=True)
    actual = generate(FastBeamSearch, [model()], dictionary, source, **options)
    expected = generate(SequenceGenerator, [model()], dictionary, source, **options)
    assert all(set(beam["tokens"].tolist()) <= possible for beam in chain(*actual))
    assert_same([[beams[0]] for beams in actual], [[beams[0]] for beams in expected], tolerance=2e-6)
    assert [len(beams) for beams in actual] == [len(beams) for beams in expected]


def test_an_ensemble_built_by_fairseq(build, dictionary, sentences) -> None:
    """fairseq's generator accepts an ensemble instead of a list of models, and is called like a module."""
    models, source = [build(ARCHITECTURES[0]).double()], sentences(LENGTHS)
    sample = {"net_input": {"src_tokens": source, "src_lengths": source.ne(dictionary.pad()).sum(dim=1)}}
    made = FastBeamSearch(EnsembleModel(models), dictionary, beam_size=4, max_len_b=12)
    assert_same(made(sample), generate(SequenceGenerator, models, dictionary, source), tolerance=2e-6)


def test_a_sentence_without_any_translation_is_an_error(build, dictionary, sentences) -> None:
    model, source = build("weighted_transformer_tiny"), sentences(LENGTHS)
    model.encoder.embedding.words.weight.data[source[0, 0]] = math.nan
    with pytest.raises(RuntimeError, match="NaN"):
        generate(FastBeamSearch, [model], dictionary, source)


def test_a_prefix_of_an_excluded_word_is_an_error_of_options(build, dictionary, sentences) -> None:
    model, source = build("weighted_transformer_tiny"), sentences(LENGTHS)
    prefix = torch.full((len(source), 1), dictionary.unk())
    with pytest.raises(RuntimeError, match="--unkpen"):
        generate(FastBeamSearch, [model], dictionary, source, prefix_tokens=prefix, unk_penalty=math.inf)


@pytest.mark.parametrize("alignment", ["hard", "soft"])
def test_alignment_of_the_fast_search(model: Model, dictionary, sentences, alignment: str) -> None:
    source, options = sentences(LENGTHS, left_pad=True), {"print_alignment": alignment}
    actual = generate(FastBeamSearchWithAlignment, [model()], dictionary, source, **options)
    expected = generate(SequenceGeneratorWithAlignment, [model()], dictionary, source, **options)
    for beam in chain(*actual, *expected):
        beam["alignment"] = torch.tensor([[float(number) for number in row] for row in beam["alignment"]])
    assert_same(actual, expected, tolerance=2e-6)


@pytest.mark.parametrize("count", [1, 2, 10])
@pytest.mark.parametrize("size", [11, 64, 640, 1280, 1281, 1343, 1344, 5000])
def test_equals_topk(count: int, size: int) -> None:
    """Sizes have a remainder or none; the best words are in one block, in the remainder, or have minus infinity."""
    torch.manual_seed(size)
    scores = torch.randn(7, size)
    scores[1, -10:] += 10
    scores[2, :10] += 10
    scores[3] = scores[3].sort()[0]
    scores[4, 1:] = -torch.inf
    scores[5] -= 100
    best, words = best_words(scores, count)
    assert torch.equal(best, scores.topk(count)[0])
    assert torch.equal(best, scores.gather(1, words))
    assert all(len(set(row)) == count for row in words.tolist())


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_random_searches(first: int) -> None:
    found = [searches.check(number) for number in range(first, first + 20)]
    assert any(by_program for by_program, _ in found)
