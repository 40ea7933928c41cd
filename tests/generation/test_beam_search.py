"""The fast search against fairseq's own."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import pytest
import torch
from fairseq.sequence_generator import EnsembleModel, SequenceGenerator, SequenceGeneratorWithAlignment
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fairseq_plugins.generation.beam_search import FastBeamSearch, FastBeamSearchWithAlignment, _Beams
from tests.conftest import ARCHITECTURES
from tests.generation.searching import LENGTHS, MODES, Model, assert_same, generate


@pytest.mark.parametrize("mode", MODES)
def test_the_fast_search(model: Model, dictionary, sentences, mode: str) -> None:
    source = sentences(LENGTHS, left_pad=True)
    actual = generate(FastBeamSearch, [model()], dictionary, source, **MODES[mode])
    assert_same(actual, generate(SequenceGenerator, [model()], dictionary, source, **MODES[mode]), tolerance=2e-6)


class Rewarding(EnsembleModel):
    """fairseq's, with a constant for each word but the end (Gehring et al. 2016, section 4.4)."""

    penalty: float

    def forward_decoder(self, *args: Any, **kwargs: Any) -> Any:
        lprobs, attention = super().forward_decoder(*args, **kwargs)
        is_word = torch.arange(lprobs.size(1), device=lprobs.device) != 2
        return lprobs + self.penalty * is_word, attention


@pytest.mark.parametrize("penalty", [1.0, -1.0])
@pytest.mark.parametrize("mode", ["length from the source", "prefix"])
def test_a_penalty_of_words(build, dictionary, sentences, mode: str, penalty: float) -> None:
    source, options = sentences(LENGTHS), {**MODES[mode], "len_penalty": 0.7}
    reference = Rewarding([build(ARCHITECTURES[0])])
    reference.penalty = penalty
    expected = generate(SequenceGenerator, reference, dictionary, source, **options)
    models = [build(ARCHITECTURES[0])]
    actual = generate(FastBeamSearch, models, dictionary, source, word_penalty=penalty, **options)
    assert_same(actual, expected, tolerance=2e-6)
    without = generate(FastBeamSearch, models, dictionary, source, **options)
    longer = sum(len(beams[0]["tokens"]) for beams in actual) - sum(len(beams[0]["tokens"]) for beams in without)
    assert longer * penalty > 0


PLAIN = ["beam", "greedy", "wide beam", "short", "length from the source", "minimum length", "suppressed words"]
PLAIN += ["another first word", "penalty on unknown words", "as long as positions allow"]


@pytest.mark.parametrize("mode", MODES)
def test_what_is_left_to_fairseq(build, dictionary, sentences, monkeypatch, mode: str) -> None:
    """Or the test above would have compared fairseq with itself."""
    left = []
    monkeypatch.setattr(SequenceGenerator, "_generate", lambda *_: left.append(mode) or [])
    generate(FastBeamSearch, [build(ARCHITECTURES[0])], dictionary, sentences(LENGTHS), **MODES[mode])
    assert left == ([] if mode in PLAIN else [mode])


def test_sentences_that_have_finished_may_stay(model: Model, dictionary, sentences, monkeypatch) -> None:
    """As on a GPU, until half have: what ends after them is not theirs any more."""
    every = [*LENGTHS, *LENGTHS, *LENGTHS]
    source = sentences(sorted(every, reverse=True), left_pad=True)
    monkeypatch.setattr(
        _Beams,
        "unfinished",
        lambda self: [place for place in range(len(self.numbers)) if any(len(each) < 4 for each in self.finished)],
    )
    actual = generate(FastBeamSearch, [model()], dictionary, source, max_len_b=20)
    assert_same(actual, generate(SequenceGenerator, [model()], dictionary, source, max_len_b=20), tolerance=2e-6)


@pytest.mark.parametrize(
    ("device", "finished", "stay"),
    [
        ("cpu", [2, 0, 1, 1], [3, 1, 2]),
        ("cpu", [2, 2, 0, 2], [2]),
        ("cpu", [0, 1, 1, 2], [0, 1, 2]),
        ("cuda", [2, 0, 1, 1], [0, 1, 2, 3]),
        ("cuda", [2, 0, 2, 1], [3, 1]),
        ("cuda", [2, 2, 2, 2], []),
    ],
)
def test_which_sentences_go_on(device: str, finished: list[int], stay: list[int]) -> None:
    """Of four with two hypotheses each; on a GPU, here a pretended one, all of them until half have finished."""
    beams = _Beams(torch.zeros(4, 5, dtype=torch.long), beam=2, longest=3, bos=2, pad=1)
    with FakeTensorMode():
        beams.tokens = torch.empty(8, 5, device=device)
    beams.finished = [[{}] * count for count in finished]
    assert beams.unfinished() == stay
    beams.keeps_all = True
    assert beams.unfinished() == ([0, 1, 2, 3] if stay else [])


@pytest.mark.parametrize("min_len", [0, 1, 3])
def test_fewer_possible_words_than_hypotheses(model: Model, dictionary, sentences, min_len: int) -> None:
    """What is forbidden is no hypothesis, not even a bad one."""
    possible = {2, 9, 21}
    names = [dictionary[word] for word in range(len(dictionary)) if word not in possible and word != dictionary.unk()]
    options = {"tokens_to_suppress": names, "unk_penalty": math.inf, "min_len": min_len, "beam_size": 4}
    source = sentences(LENGTHS, left_pad=True)
    actual = generate(FastBeamSearch, [model()], dictionary, source, **options)
    expected = generate(SequenceGenerator, [model()], dictionary, source, **options)
    assert all(set(beam["tokens"].tolist()) <= possible for beam in chain(*actual))
    assert_same([[beams[0]] for beams in actual], [[beams[0]] for beams in expected], tolerance=2e-6)
    assert [len(beams) for beams in actual] == [len(beams) for beams in expected]


def test_an_ensemble_that_fairseq_has_made(build, dictionary, sentences) -> None:
    """fairseq's generator takes one in the place of a list of models; by itself too."""
    models, source = [build(ARCHITECTURES[0])], sentences(LENGTHS)
    sample = {"net_input": {"src_tokens": source, "src_lengths": source.ne(dictionary.pad()).sum(dim=1)}}
    made = FastBeamSearch(EnsembleModel(models), dictionary, beam_size=4, max_len_b=12)
    assert_same(made(sample), generate(SequenceGenerator, models, dictionary, source), tolerance=2e-6)


def test_a_model_with_probabilities_of_its_own(build, architecture: str, dictionary, sentences) -> None:
    def own() -> Any:
        model = build(architecture)

        class Own(type(model)):  # type: ignore[misc]
            def get_normalized_probs(self, decoder_out: Any, log_probs: bool, sample: Any) -> Tensor:
                lprobs = super().get_normalized_probs(decoder_out, log_probs, sample)
                lprobs[..., 20] += 20
                return lprobs

        model.__class__ = Own
        return model

    source = sentences(LENGTHS, left_pad=True)
    actual = generate(FastBeamSearch, [own()], dictionary, source)
    assert_same(actual, generate(SequenceGenerator, [own()], dictionary, source), tolerance=2e-6)
    plain = generate(SequenceGenerator, [build(architecture)], dictionary, source)
    assert plain[0][0]["tokens"].tolist() != actual[0][0]["tokens"].tolist()


def test_a_sentence_without_any_translation_is_an_error(build, dictionary, sentences) -> None:
    model, source = build("weighted_transformer_tiny"), sentences(LENGTHS)
    model.encoder.embedding.words.weight.data[source[0, 0]] = math.nan
    with pytest.raises(RuntimeError, match="a sentence has no translation"):
        generate(FastBeamSearch, [model], dictionary, source)


@pytest.mark.parametrize("alignment", ["hard", "soft"])
def test_alignment_of_the_fast_search(model: Model, dictionary, sentences, alignment: str) -> None:
    source, options = sentences(LENGTHS, left_pad=True), {"print_alignment": alignment}
    actual = generate(FastBeamSearchWithAlignment, [model()], dictionary, source, **options)
    expected = generate(SequenceGeneratorWithAlignment, [model()], dictionary, source, **options)
    for beam in chain(*actual, *expected):
        beam["alignment"] = torch.tensor([[float(number) for number in row] for row in beam["alignment"]])
    assert_same(actual, expected, tolerance=2e-6)
