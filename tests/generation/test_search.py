"""The searches against fairseq's own: over all words the same, over some as if the others had no probability."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq import search, utils
from fairseq.data import Dictionary
from fairseq.models import BaseFairseqModel
from fairseq.sequence_generator import EnsembleModel, SequenceGenerator, SequenceGeneratorWithAlignment
from fairseq.sequence_scorer import SequenceScorer
from fairseq.token_generation_constraints import pack_constraints
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fairseq_plugins.generation.beam_search import FastBeamSearch, FastBeamSearchWithAlignment, _Beams
from fairseq_plugins.generation.candidates import Candidates
from fairseq_plugins.generation.config import TranslationFastConfig
from fairseq_plugins.generation.search import CandidateSearch, CandidateSearchWithAlignment
from fairseq_plugins.generation.task import TranslationFastTask
from tests.conftest import ARCHITECTURES
from tests.generation.fairseq_models import FAIRSEQ_MODELS, fairseq_model
from tests.models.test_generation import MODES

LENGTHS = [9, 6, 3, 1]  # fairseq's lstm wants them to fall
PREFIX = torch.tensor([[7, 8, 9], [10, 1, 1], [12, 2, 1], [1, 1, 1]])  # one is a whole sentence
OTHER_MODES = {
    "prefix with an end": {"prefix_tokens": PREFIX},
    "suppressed words": {"tokens_to_suppress": ("w7", "w8", "w30")},
    "another first word": {"bos_token": 8},
    "as long as positions allow": {"max_len": 7, "min_len": 6},
    "penalty on unknown words": {"unk_penalty": 2, "len_penalty": 0.5, "temperature": 1.3},
    "many ordered constraints": {
        "constraints": pack_constraints(
            [[torch.tensor([word]) for word in (7, 12, 8, 9, 10)], [], [torch.tensor([6])], []]
        ),
        "search": lambda d: search.LexicallyConstrainedBeamSearch(d, "ordered"),
    },
    "as long as the source": {
        "match_source_len": True,
        "search": lambda d: search.LengthConstrainedBeamSearch(d, min_len_a=1, min_len_b=0, max_len_a=1, max_len_b=0),
    },
}
MODES = {**MODES, **OTHER_MODES}
Model = Callable[..., BaseFairseqModel]


@pytest.fixture(params=[*ARCHITECTURES, *FAIRSEQ_MODELS])
def model(request: pytest.FixtureRequest, build: Model, task: SimpleNamespace, device: torch.device) -> Model:
    """``model(seed=1)``: the same random model at each call."""
    if request.param in FAIRSEQ_MODELS:
        return lambda seed=1: fairseq_model(request.param, task, seed).to(device)
    return lambda seed=1: build(request.param, seed)


@pytest.fixture
def everything(dictionary: Dictionary) -> Candidates:
    translations = torch.full((len(dictionary), 1), dictionary.pad())
    return Candidates(translations, torch.ones(len(dictionary), dtype=torch.bool))


@pytest.fixture
def some(dictionary: Dictionary) -> Candidates:
    """Of 44 words the special ones, 8 frequent ones, and one for each source word: some 25 for a batch."""
    always = torch.zeros(len(dictionary), dtype=torch.bool)
    always[: dictionary.nspecial] = True
    generator = torch.Generator().manual_seed(1)
    always[torch.randperm(40, generator=generator)[:8] + 4] = True
    return Candidates(torch.randint(4, 44, (len(dictionary), 1), generator=generator), always)


def as_if_impossible(model: Any, mask: Tensor) -> Any:
    """The model, in whose eyes words outside the mask cannot be."""
    forward = model.decoder.forward

    def masked(*args: Any, **kwargs: Any) -> Any:
        logits, extra = forward(*args, **kwargs)
        return logits.masked_fill(~mask, -math.inf), extra

    model.decoder.forward = masked
    return model


def generate(kind: type, models: list[Any], dictionary: Dictionary, source: Tensor, **options: Any) -> Any:
    """What is not the generator's is for its call."""
    sample = {"net_input": {"src_tokens": source, "src_lengths": source.ne(dictionary.pad()).sum(dim=1)}}
    call = {name: options.pop(name) for name in ("prefix_tokens", "constraints", "bos_token") if name in options}
    call = {name: value.to(source.device) if torch.is_tensor(value) else value for name, value in call.items()}
    strategy = options.pop("search", None)
    options["search_strategy"] = strategy(dictionary) if strategy else None
    generator = kind(models, dictionary, **{"beam_size": 4, "max_len_b": 12, **options})
    torch.manual_seed(3)
    return generator.generate(models, sample, **call)


def assert_same(actual: Any, expected: Any, tolerance: float) -> None:
    assert [[beam["tokens"].tolist() for beam in beams] for beams in actual] == [
        [beam["tokens"].tolist() for beam in beams] for beams in expected
    ]
    for mine, theirs in zip(chain(*actual), chain(*expected), strict=True):
        for name in ("score", "positional_scores", "attention", "alignment"):
            torch.testing.assert_close(mine[name], theirs[name], rtol=tolerance, atol=tolerance)


def forced_words(options: dict[str, Any]) -> list[int]:
    words = [int(word[1:]) + 4 for word in options.get("tokens_to_suppress", ())]
    words += options.get("prefix_tokens", torch.empty(0)).flatten().int().tolist()
    words += options.get("constraints", torch.empty(0, 1))[:, 1:].flatten().int().tolist()
    return [*words, options["bos_token"]] if "bos_token" in options else words


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


@pytest.mark.parametrize("mode", MODES)
def test_all_words(model: Model, everything: Candidates, dictionary, sentences, mode: str) -> None:
    """Sampled words too.  The scores are the same numbers where a product is, whose memory lies elsewhere."""
    source = sentences(LENGTHS, left_pad=True)
    actual = generate(CandidateSearch, [model()], dictionary, source, candidates=everything, **MODES[mode])
    assert_same(actual, generate(SequenceGenerator, [model()], dictionary, source, **MODES[mode]), tolerance=2e-6)


# After a prefix that ends the sentence fairseq fills its beams with copies, and their attention is that of some beam
# of no probability.
@pytest.mark.parametrize("mode", [mode for mode in MODES if "sampling" not in mode and mode != "prefix with an end"])
def test_some_words(model: Model, some: Candidates, dictionary, sentences, device, mode: str) -> None:
    source = sentences(LENGTHS, left_pad=True)
    mask, forced = some.mask(source), forced_words(MODES[mode])
    assert not forced or not mask[forced].all()
    mask[forced] = True
    assert 20 <= int(mask.sum()) <= 35
    actual = generate(CandidateSearch, [model()], dictionary, source, candidates=some, **MODES[mode])
    expected = generate(SequenceGenerator, [as_if_impossible(model(), mask)], dictionary, source, **MODES[mode])
    assert_same(actual, expected, tolerance=2e-5)


@torch.no_grad()
def test_sampling_among_some_words(model: Model, some: Candidates, dictionary, sentences) -> None:
    """Other random numbers than over the whole vocabulary; each with the score that it then has."""
    source = sentences([5])
    words = some.mask(source).nonzero().squeeze(1)
    ((beam, *_),) = generate(
        CandidateSearch, [model()], dictionary, source, candidates=some, search=search.Sampling, min_len=4
    )
    assert set(beam["tokens"].tolist()) <= set(words.tolist())
    previous = torch.cat([words.new_tensor([dictionary.eos()]), beam["tokens"][:-1]])
    scored = as_if_impossible(model(), some.mask(source))
    encoded = scored.encoder.forward_torchscript({"src_tokens": source, "src_lengths": torch.tensor([5])})
    logits = scored.decoder.forward(previous.unsqueeze(0), encoded)[0][0]
    expected = logits[4:].log_softmax(dim=-1).gather(1, beam["tokens"][4:].unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(beam["positional_scores"][4:], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["everything", "some"])
def test_ensemble(model: Model, dictionary, sentences, kind: str, request: pytest.FixtureRequest) -> None:
    candidates, source = request.getfixturevalue(kind), sentences(LENGTHS)
    actual = generate(CandidateSearch, [model(1), model(2)], dictionary, source, candidates=candidates)
    plain = [as_if_impossible(model(seed), candidates.mask(source)) for seed in (1, 2)]
    assert_same(actual, generate(SequenceGenerator, plain, dictionary, source), tolerance=2e-5)


@pytest.mark.parametrize("kind", ["everything", "some"])
def test_prepared_for_inference(model: Model, dictionary, sentences, kind: str, request) -> None:
    candidates, source = request.getfixturevalue(kind), sentences(LENGTHS)
    models = [model(), as_if_impossible(model(), candidates.mask(source))]
    for each in models:
        each.make_generation_fast_(beamable_mm_beam_size=4, need_attn=True)
    actual = generate(CandidateSearch, models[:1], dictionary, source, candidates=candidates)
    assert_same(actual, generate(SequenceGenerator, models[1:], dictionary, source), tolerance=2e-5)


@pytest.mark.parametrize("alignment", ["hard", "soft"])
def test_alignment_of_the_fast_search(model: Model, dictionary, sentences, alignment: str) -> None:
    source, options = sentences(LENGTHS, left_pad=True), {"print_alignment": alignment}
    actual = generate(FastBeamSearchWithAlignment, [model()], dictionary, source, **options)
    expected = generate(SequenceGeneratorWithAlignment, [model()], dictionary, source, **options)
    for beam in chain(*actual, *expected):
        beam["alignment"] = torch.tensor([[float(number) for number in row] for row in beam["alignment"]])
    assert_same(actual, expected, tolerance=2e-6)


@pytest.mark.parametrize("alignment", ["hard", "soft"])
@pytest.mark.parametrize("full_context", [False, True])
def test_alignment(model: Model, some: Candidates, dictionary, sentences, alignment: str, full_context: bool) -> None:
    """Computed in a second pass over the hypotheses where the model says so: that one reads the dictionary's words."""
    source = sentences(LENGTHS, left_pad=True)
    ours, theirs = model(), as_if_impossible(model(), some.mask(source))
    if full_context:
        if not isinstance(ours(source, source.ne(1).sum(1), source)[1], dict):
            pytest.skip("fairseq cannot: this model does not name its attention")
        ours.full_context_alignment = theirs.full_context_alignment = True
    options = {"print_alignment": alignment, "beam_size": 3}
    actual = generate(CandidateSearchWithAlignment, [ours], dictionary, source, candidates=some, **options)
    expected = generate(SequenceGeneratorWithAlignment, [theirs], dictionary, source, **options)
    for beam in chain(*actual, *expected):
        beam["alignment"] = torch.tensor([[float(number) for number in row] for row in beam["alignment"]])
    assert_same(actual, expected, tolerance=2e-5)


def test_in_the_middle_of_training(model: Model, some: Candidates, dictionary, sentences) -> None:
    """As validation by BLEU does it: one generator for all of the training, whose weights change in place."""
    source = sentences(LENGTHS)
    sample = {"net_input": {"src_tokens": source, "src_lengths": source.ne(dictionary.pad()).sum(dim=1)}}
    trained = model(1)
    generator = CandidateSearch([trained], dictionary, candidates=some, beam_size=4, max_len_b=12)
    first = generator.generate([trained], sample)
    trained.load_state_dict(model(2).state_dict())
    actual = generator.generate([trained], sample)
    assert_same(actual, generate(CandidateSearch, [model(2)], dictionary, source, candidates=some), tolerance=0)
    assert any(
        mine[0]["tokens"].tolist() != theirs[0]["tokens"].tolist() for mine, theirs in zip(actual, first, strict=True)
    )


@pytest.mark.parametrize("fails", [False, True])
def test_leaves_everything_as_it_was(model: Model, some: Candidates, dictionary, sentences, fails: bool) -> None:
    class Failing(search.BeamSearch):
        def step(self, step: int, *args: Any, **kwargs: Any) -> Any:
            if fails and step == 1:
                raise RuntimeError("interrupted")
            return super().step(step, *args, **kwargs)

    source, models = sentences(LENGTHS), [model(1), model(2)]
    sample = {"net_input": {"src_tokens": source, "src_lengths": source.ne(dictionary.pad()).sum(dim=1)}}
    generator = CandidateSearch(
        models,
        dictionary,
        some,
        beam_size=4,
        max_len_b=12,
        search_strategy=Failing(dictionary),
        tokens_to_suppress=("w7",),
    )
    parts = [dict(each.named_modules(remove_duplicate=False)) for each in models]
    values = [{name: value.clone() for name, value in each.state_dict().items()} for each in models]
    if fails:
        with pytest.raises(RuntimeError, match="interrupted"):
            generator.generate(models, sample)
    else:
        generator.generate(models, sample)
    assert (generator.vocab_size, generator.token_indices_to_suppress.tolist()) == (len(dictionary), [11])
    assert generator.model.words is None
    for each, modules, before in zip(models, parts, values, strict=True):
        assert all(module is modules[name] for name, module in each.named_modules(remove_duplicate=False))
        assert list(each.state_dict()) == list(before)
        for name, value in each.state_dict().items():
            # fairseq 0.12.2's positions have a buffer that nothing is written to, by chance not a number.
            torch.testing.assert_close(value, before[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("options", "needed"),
    [({"beam_size": 5}, 11), ({"search": lambda d: search.Sampling(d, sampling_topk=9), "beam_size": 1}, 9)],
)
def test_too_few_candidates(build, dictionary, sentences, options: dict[str, Any], needed: int) -> None:
    models, source = [build(ARCHITECTURES[0])], sentences([3])
    always = torch.zeros(len(dictionary), dtype=torch.bool)
    always[: needed - 1] = True
    candidates = Candidates(torch.full((len(dictionary), 1), needed), always)
    generate(CandidateSearch, models, dictionary, source, candidates=candidates, **options)
    candidates.translations.fill_(0)
    with pytest.raises(ValueError, match=f"needs {needed} candidates and a batch has only {needed - 1}: raise --freq"):
        generate(CandidateSearch, models, dictionary, source, candidates=candidates, **options)


def test_what_needs_the_whole_vocabulary(build, dictionary, some: Candidates) -> None:
    models = [build(ARCHITECTURES[0])]
    with pytest.raises(ValueError, match=r"^--candidates does not go with --lm-path: a language model scores "):
        CandidateSearch(models, dictionary, some, lm_model=models[0])
    strategy = search.PrefixConstrainedBeamSearch(dictionary, lambda batch, tokens: [4])
    with pytest.raises(ValueError, match=r"^--candidates does not go with prefix_allowed_tokens_fn, whose .* before$"):
        CandidateSearch(models, dictionary, some, search_strategy=strategy)


class Own(SequenceGenerator):
    """A caller's generator."""


@pytest.mark.parametrize(
    ("with_candidates", "args", "kwargs", "kind"),
    [
        (True, {}, {}, CandidateSearch),
        (True, {"print_alignment": "soft"}, {}, CandidateSearchWithAlignment),
        (True, {"score_reference": True}, {}, SequenceScorer),
        (True, {}, {"seq_gen_cls": Own}, Own),
        (False, {}, {}, FastBeamSearch),
        (False, {"print_alignment": "hard"}, {}, FastBeamSearchWithAlignment),
    ],
)
def test_generator_of_the_task(
    build, dictionary, some, with_candidates: bool, args: Any, kwargs: Any, kind: type
) -> None:
    task = TranslationFastTask(TranslationFastConfig(word_penalty=0.25), dictionary, dictionary)
    assert task.candidates is None
    if with_candidates:
        task.candidates = some
    extra = {"lm_model": None, "lm_weight": 0.5}
    generator = task.build_generator(
        [build(ARCHITECTURES[0])], Namespace(beam=3, **args), extra_gen_cls_kwargs=extra, **kwargs
    )
    assert type(generator) is kind
    assert extra == {"lm_model": None, "lm_weight": 0.5}
    if kind is not SequenceScorer:
        assert generator.beam_size == 3
    if isinstance(generator, FastBeamSearch):
        assert generator.model.word_penalty == 0.25
    if isinstance(generator, CandidateSearch):
        assert generator.candidates is some
    if isinstance(generator, SequenceGeneratorWithAlignment):
        chosen = {"hard": utils.extract_hard_alignment, "soft": utils.extract_soft_alignment}
        assert generator.extract_alignment is chosen[args["print_alignment"]]


def test_generators_of_a_task_share_what_takes_long_to_make(build, dictionary, caplog) -> None:
    """fairseq's Python interface makes a generator for each call."""
    task = TranslationFastTask(TranslationFastConfig(compile_steps=True), dictionary, dictionary)
    model = build(ARCHITECTURES[0])
    one, other = (task.build_generator([model], Namespace(beam=3)) for _ in range(2))
    assert one.packing is other.packing
    assert one.compiled is other.compiled is not None
    assert "not compiled" not in caplog.text
    task.build_generator([model, model], Namespace(beam=3))
    assert "steps are not compiled: that is for plain beam search" in caplog.text
