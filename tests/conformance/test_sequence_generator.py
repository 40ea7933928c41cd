"""Counterparts of fairseq's test_sequence_generator for real models.

tests/common/test_generation.py compares stepwise with full decoding in all search modes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator

from tests.common.test_generation import LENGTHS, generate

EOS = 2
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
