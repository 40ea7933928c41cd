"""Counterparts of fairseq's test_sequence_generator for real models: hypotheses and scores obey the options.

Comparisons of stepwise and full decoding in all search modes are in tests/common/test_generation.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from fairseq import search
from fairseq.sequence_generator import SequenceGenerator
from fairseq.token_generation_constraints import pack_constraints

from tests.common.test_generation import LENGTHS, generate

EOS, UNK = 2, 3
FAMILIES = ["convs2s_tiny", "weighted_transformer_tiny", "conv_encoder_tiny"]


def each(hypotheses: list[list[dict[str, Any]]]) -> Iterator[tuple[int, list[int], dict[str, Any]]]:
    """Yield each hypothesis with the number of its sentence and its tokens."""
    for sentence, beams in enumerate(hypotheses):
        assert beams
        for beam in beams:
            yield sentence, beam["tokens"].tolist(), beam


def forced(model: Any, row: torch.Tensor, tokens: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Return log-probabilities (T, V) for forced tokens, computed without any state."""
    source = row[row.ne(1)].unsqueeze(0)
    previous = torch.cat([tokens.new_tensor([EOS]), tokens[:-1]]).unsqueeze(0)
    return (model(source, None, previous)[0][0] / temperature).log_softmax(dim=-1)


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0, 3.0])
@torch.no_grad()
def test_scores_are_normalised_by_length(build, architecture, sentences, dictionary, penalty: float) -> None:
    """A score is the sum of token scores over length to the power of --lenpen; the best score comes first."""
    found = generate([build(architecture)], dictionary, sentences(LENGTHS), len_penalty=penalty)
    for _, tokens, beam in each(found):
        total = float(beam["positional_scores"].sum())
        assert float(beam["score"]) == pytest.approx(total / len(tokens) ** penalty, rel=1e-4)
    for beams in found:
        scores = [float(beam["score"]) for beam in beams]
        assert scores == sorted(scores, reverse=True)


@torch.no_grad()
def test_scores_may_stay_sums(build, architecture, sentences, dictionary) -> None:
    found = generate([build(architecture)], dictionary, sentences(LENGTHS), normalize_scores=False)
    for _, _, beam in each(found):
        assert float(beam["score"]) == pytest.approx(float(beam["positional_scores"].sum()), rel=1e-4)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
@torch.no_grad()
def test_scores_are_the_models(build, architecture, sentences, dictionary, temperature: float) -> None:
    """Token scores are log-probabilities of the logits over --temperature, computed for all tokens at once."""
    model, source = build(architecture), sentences(LENGTHS)
    for sentence, _, beam in each(generate([model], dictionary, source, temperature=temperature)):
        expected = forced(model, source[sentence], beam["tokens"], temperature).gather(1, beam["tokens"].unsqueeze(1))
        torch.testing.assert_close(beam["positional_scores"], expected.squeeze(1), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_an_ensemble_of_families(build, sentences, dictionary) -> None:
    """An ensemble of all three families scores by the logarithm of their mean probability."""
    models, source = [build(name) for name in FAMILIES], sentences(LENGTHS)
    for sentence, _, beam in each(generate(models, dictionary, source)):
        alone = torch.stack([forced(model, source[sentence], beam["tokens"]) for model in models])
        mean = alone.logsumexp(dim=0) - math.log(len(models))
        expected = mean.gather(1, beam["tokens"].unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(beam["positional_scores"], expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_lengths_are_kept(build, architecture, sentences, dictionary) -> None:
    """Lengths, without the end symbol, are between --min-len and --max-len-b."""
    model, source = build(architecture), sentences(LENGTHS)
    found = generate([model], dictionary, source, min_len=4, max_len_b=6)
    lengths = {len(tokens) - 1 for _, tokens, _ in each(found)}
    assert min(lengths) >= 4
    assert max(lengths) <= 6


@torch.no_grad()
def test_lengths_are_the_sources(build, architecture, sentences, dictionary) -> None:
    """With --match-source-len and fairseq's search for it, lengths are those of the sources."""
    sizes = {"min_len_a": 1, "min_len_b": 0, "max_len_a": 1, "max_len_b": 0}
    found = generate(
        [build(architecture)],
        dictionary,
        sentences(LENGTHS),
        search=lambda words: search.LengthConstrainedBeamSearch(words, **sizes),
        match_source_len=True,
        beam_size=1,
    )
    # fairseq's releases differ in whether they count the source's end symbol.
    assert {len(tokens) - LENGTHS[sentence] for sentence, tokens, _ in each(found)} in ({0}, {1})


@torch.no_grad()
def test_ngrams_are_not_repeated(build, architecture, sentences, dictionary) -> None:
    """Without the plugin, fairseq's search on a CPU repeats n-grams, also with fairseq's own models."""
    model, source = build(architecture), sentences(LENGTHS)
    options = {"min_len": 10, "max_len_b": 14}

    def repeats(tokens: list[int]) -> bool:
        bigrams = list(pairwise(tokens))
        return len(bigrams) > len(set(bigrams))

    assert any(repeats(tokens) for _, tokens, _ in each(generate([model], dictionary, source, **options)))
    options["no_repeat_ngram_size"] = 2
    assert not any(repeats(tokens) for _, tokens, _ in each(generate([model], dictionary, source, **options)))


@torch.no_grad()
def test_unknown_words_can_be_forbidden(build, architecture, sentences, dictionary) -> None:
    model = build(architecture)
    found = generate([model], dictionary, sentences(LENGTHS), unk_penalty=math.inf, beam_size=9)
    assert all(UNK not in tokens for _, tokens, _ in each(found))


@torch.no_grad()
def test_prefixes_are_kept(build, architecture, sentences, dictionary, device) -> None:
    """Hypotheses begin with prefixes of different lengths, one of them empty."""
    prefixes = [[7, 8, 9], [10], [], [11, 12]]
    tensor = torch.full((4, 3), dictionary.pad(), device=device)
    for row, prefix in zip(tensor, prefixes, strict=True):
        row[: len(prefix)] = torch.tensor(prefix)
    found = generate([build(architecture)], dictionary, sentences(LENGTHS), prefix_tokens=tensor)
    for sentence, tokens, _ in each(found):
        assert tokens[: len(prefixes[sentence])] == prefixes[sentence]


@pytest.mark.parametrize("kind", ["ordered", "unordered"])
@torch.no_grad()
def test_constraints_are_kept(build, architecture, sentences, dictionary, device, kind: str) -> None:
    """The best hypothesis contains the constraints, and contains ordered constraints in their order."""
    phrases = [[[7, 8], [9]], [[9], [6]], [], [[10]]]
    constraints = pack_constraints([[torch.tensor(phrase) for phrase in each] for each in phrases]).to(device)
    found = generate(
        [build(architecture)],
        dictionary,
        sentences(LENGTHS),
        search=lambda words: search.LexicallyConstrainedBeamSearch(words, kind),
        constraints=constraints,
        beam_size=8,
    )
    for wanted, beams in zip(phrases, found, strict=True):
        text = " ".join(map(str, ["", *beams[0]["tokens"].tolist(), ""]))
        places = [text.find(" ".join(map(str, ["", *phrase, ""]))) for phrase in wanted]
        assert -1 not in places
        if kind == "ordered":
            assert places == sorted(places)


@torch.no_grad()
def test_sampling_from_one_word_is_greedy(build, architecture, sentences, dictionary) -> None:
    model, source = build(architecture), sentences(LENGTHS)
    greedy = generate([model], dictionary, source, beam_size=1)
    sampled = generate(
        [model], dictionary, source, beam_size=1, search=lambda words: search.Sampling(words, sampling_topk=1)
    )
    assert [tokens for _, tokens, _ in each(sampled)] == [tokens for _, tokens, _ in each(greedy)]


@torch.no_grad()
def test_groups_of_a_diverse_beam_differ(build, architecture, sentences, dictionary) -> None:
    """A strong penalty makes each group begin with another word.

    Hypotheses have one word: in longer ones, fairseq 0.12.2 lets a group replace another group that has ended.
    """
    found = generate(
        [build(architecture)],
        dictionary,
        sentences(LENGTHS),
        search=lambda words: search.DiverseBeamSearch(words, num_groups=4, diversity_strength=1e4),
        min_len=1,
        max_len_b=1,
    )
    for beams in found:
        assert len({int(beam["tokens"][0]) for beam in beams}) == len(beams) == 4


@torch.no_grad()
def test_a_generator_keeps_nothing_of_earlier_batches(build, architecture, sentences, dictionary) -> None:
    """A generator used for different batches in turn gives the same results as a new generator for each batch."""
    model = build(architecture)
    generator = SequenceGenerator([model], dictionary, beam_size=3, max_len_b=12)
    lengths = [[9, 3, 6], [2], [4, 4, 4, 4, 8], [9, 3, 6]]
    batches = [sentences(each, seed=seed) for seed, each in enumerate(lengths)]
    for source in (*batches, *reversed(batches)):
        sample = {"net_input": {"src_tokens": source, "src_lengths": source.ne(dictionary.pad()).sum(dim=1)}}
        actual, expected = generator.generate([model], sample), generate([model], dictionary, source, beam_size=3)
        for mine, theirs in zip(chain(*actual), chain(*expected), strict=True):
            assert mine["tokens"].tolist() == theirs["tokens"].tolist()
            assert float(mine["score"]) == float(theirs["score"])
