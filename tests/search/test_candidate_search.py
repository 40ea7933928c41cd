"""Search with candidates, compared with fairseq's search over all words, or with other words masked."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import pytest
import torch
from fairseq import search
from fairseq.sequence_generator import SequenceGenerator, SequenceGeneratorWithAlignment
from torch import Tensor

from fairseq_plugins.search.generator import FastBeamSearch, FastBeamSearchWithAlignment
from fairseq_plugins.vocabulary.candidates import Candidates
from tests.conftest import ARCHITECTURES
from tests.search.searching import LENGTHS, MODES, Model, assert_same, generate


def with_masked_output(model: Any, mask: Tensor) -> Any:
    """Set the probability of words outside the mask to zero."""
    forward = model.decoder.forward

    def masked(*args: Any, **kwargs: Any) -> Any:
        logits, extra = forward(*args, **kwargs)
        return logits.masked_fill(~mask, -math.inf), extra

    model.decoder.forward = masked
    return model


def forced_words(options: dict[str, Any]) -> list[int]:
    words = [int(word[1:]) + 4 for word in options.get("tokens_to_suppress", ())]
    words += options.get("prefix_tokens", torch.empty(0)).flatten().int().tolist()
    words += options.get("constraints", torch.empty(0, 1))[:, 1:].flatten().int().tolist()
    return [*words, options["bos_token"]] if "bos_token" in options else words


@pytest.mark.parametrize("mode", [mode for mode in MODES if "sampling" not in mode])
def test_some_words(model: Model, some: Candidates, dictionary, sentences, device, mode: str) -> None:
    source = sentences(LENGTHS, left_pad=True)
    mask, forced = some.mask(source), forced_words(MODES[mode])
    assert not forced or not mask[forced].all()
    mask[forced] = True
    assert 20 <= int(mask.sum()) <= 35
    actual = generate(FastBeamSearch, [model()], dictionary, source, candidates=some, **MODES[mode])
    expected = generate(SequenceGenerator, [with_masked_output(model(), mask)], dictionary, source, **MODES[mode])
    assert_same(actual, expected, tolerance=2e-5)


def test_another_first_word_in_a_search_of_fairseq(model: Model, some: Candidates, dictionary, sentences) -> None:
    """The first word's index among the candidates differs from its index in the dictionary."""
    source, options = sentences(LENGTHS, left_pad=True), {**MODES["no repetition"], "bos_token": 40}
    mask = some.mask(source).index_fill_(0, torch.tensor(40, device=source.device), True)
    actual = generate(FastBeamSearch, [model()], dictionary, source, candidates=some, **options)
    expected = generate(SequenceGenerator, [with_masked_output(model(), mask)], dictionary, source, **options)
    assert_same(actual, expected, tolerance=2e-5)


@torch.no_grad()
def test_sampling_some_words(model: Model, some: Candidates, dictionary, sentences) -> None:
    """Random numbers differ from sampling over all words, so the test compares scores of the sampled words."""
    source = sentences([5])
    words = some.mask(source).nonzero().squeeze(1)
    ((beam, *_),) = generate(
        FastBeamSearch, [model()], dictionary, source, candidates=some, search=search.Sampling, min_len=4
    )
    assert set(beam["tokens"].tolist()) <= set(words.tolist())
    previous = torch.cat([words.new_tensor([dictionary.eos()]), beam["tokens"][:-1]])
    scored = with_masked_output(model(), some.mask(source))
    encoded = scored.encoder.forward_torchscript({"src_tokens": source, "src_lengths": torch.tensor([5])})
    logits = scored.decoder.forward(previous.unsqueeze(0), encoded)[0][0]
    expected = logits[4:].log_softmax(dim=-1).gather(1, beam["tokens"][4:].unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(beam["positional_scores"][4:], expected.float(), rtol=1e-4, atol=1e-4)


def test_ensemble(model: Model, some: Candidates, dictionary, sentences) -> None:
    source = sentences(LENGTHS)
    actual = generate(FastBeamSearch, [model(1), model(2)], dictionary, source, candidates=some)
    plain = [with_masked_output(model(seed), some.mask(source)) for seed in (1, 2)]
    assert_same(actual, generate(SequenceGenerator, plain, dictionary, source), tolerance=2e-5)


@pytest.mark.parametrize("alignment", ["hard", "soft"])
@pytest.mark.parametrize("full_context", [False, True])
def test_alignment(model: Model, some: Candidates, dictionary, sentences, alignment: str, full_context: bool) -> None:
    """With full_context_alignment, a second pass reads the hypotheses as words of the dictionary."""
    source = sentences(LENGTHS, left_pad=True)
    ours, theirs = model(), with_masked_output(model(), some.mask(source))
    if full_context:
        if not isinstance(ours(source, source.ne(1).sum(1), source)[1], dict):
            pytest.skip("fairseq cannot: this model does not name its attention")
        ours.full_context_alignment = theirs.full_context_alignment = True
    options = {"print_alignment": alignment, "beam_size": 3}
    actual = generate(FastBeamSearchWithAlignment, [ours], dictionary, source, candidates=some, **options)
    expected = generate(SequenceGeneratorWithAlignment, [theirs], dictionary, source, **options)
    for beam in chain(*actual, *expected):
        beam["alignment"] = torch.tensor([[float(number) for number in row] for row in beam["alignment"]])
    assert_same(actual, expected, tolerance=2e-5)


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({"beam_size": 5}, 6),
        ({"beam_size": 5, "search": lambda d: search.DiverseSiblingsSearch(d, 0.5)}, 11),
        ({"search": lambda d: search.Sampling(d, sampling_topk=9), "beam_size": 1}, 9),
    ],
)
def test_too_few_candidates(build, dictionary, sentences, options: dict[str, Any], needed: int) -> None:
    models, source = [build(ARCHITECTURES[0])], sentences([3])
    always = torch.zeros(len(dictionary), dtype=torch.bool)
    always[: needed - 1] = True
    candidates = Candidates(torch.full((len(dictionary), 1), needed), always)
    generate(FastBeamSearch, models, dictionary, source, candidates=candidates, **options)
    candidates.translations.fill_(0)
    with pytest.raises(ValueError, match=f"^--candidates: .* {needed - 1} .* {needed}; "):
        generate(FastBeamSearch, models, dictionary, source, candidates=candidates, **options)


def test_options_that_need_the_whole_vocabulary(build, dictionary, some: Candidates) -> None:
    models = [build(ARCHITECTURES[0])]
    with pytest.raises(ValueError, match="--lm-path"):
        FastBeamSearch(models, dictionary, candidates=some, lm_model=models[0])
    strategy = search.PrefixConstrainedBeamSearch(dictionary, lambda batch, tokens: [4])
    with pytest.raises(ValueError, match="prefix_allowed_tokens_fn"):
        FastBeamSearch(models, dictionary, candidates=some, search_strategy=strategy)
