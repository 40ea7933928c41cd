"""Counterparts of fairseq's test_binaries, test_reproducibility and test_sequence_generator for real models.

tests/common/test_generation.py compares stepwise with full decoding in all search modes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator

from tests.common.test_generation import LENGTHS, generate
from tests.conformance.conftest import assert_same_parameters
from tests.conftest import ARCHITECTURES

# All 64 sentences are one batch, so that an epoch has one update.
WHOLE = ["--batch-size", 64]
QUARTERS = ["--batch-size", 16]  # four updates per epoch


@pytest.fixture(scope="module", params=ARCHITECTURES)
def trained(request: pytest.FixtureRequest, train, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Train two epochs with validation by BLEU, as fairseq's test_eval_bleu does."""
    save = tmp_path_factory.mktemp("trained")
    bleu = ["--eval-bleu", "--eval-bleu-print-samples", "--eval-bleu-remove-bpe", "--eval-bleu-detok", "space"]
    bleu += ["--eval-bleu-args", '{"beam": 4, "min_len": 10, "max_len_b": 15}']
    state = train(request.param, save, *QUARTERS, *bleu, "--max-epoch", 2, "--save-interval-updates", 2)
    assert state["optimizer_history"][-1]["num_updates"] == 8
    return request.param, save


def test_batches_add_up_over_an_update(train, architecture: str, tmp_path: Path) -> None:
    whole = train(architecture, tmp_path / "whole", *WHOLE, "--max-epoch", 2)
    parts = train(architecture, tmp_path / "parts", *QUARTERS, "--update-freq", 4, "--max-epoch", 2)
    assert whole["optimizer_history"][-1]["num_updates"] == parts["optimizer_history"][-1]["num_updates"] == 2
    assert_same_parameters(whole, parts)


SHARED = "encoder.embedding.words.weight", "decoder.embedding.words.weight", "decoder.output_projection.weight"


@pytest.mark.parametrize(
    ("architecture", "option", "equal"),
    [
        ("convs2s_tiny", "--share-input-output-embed", SHARED[1:]),
        ("weighted_transformer_tiny", "--share-embeddings=all", SHARED),
        ("weighted_transformer_tiny", "--share-embeddings=decoder", SHARED[1:]),
        ("weighted_transformer_tiny", "--share-embeddings=none", ()),
    ],
)
def test_shared_embeddings(train, translate, architecture: str, option: str, equal: tuple[str, ...], tmp_path) -> None:
    """Shared parameters stay equal in training, others diverge, and the model translates in each case."""
    state = train(architecture, tmp_path, *WHOLE, option)
    parameters = [state["model"][name] for name in SHARED]
    ones = [torch.equal(one, other) for one, other in pairwise(parameters)]
    assert ones == [SHARED[0] in equal, SHARED[2] in equal]
    assert sorted(translate(tmp_path, "--beam", 2)) == list(range(16))


def test_resuming_within_an_epoch(train, trained: tuple[str, Path], tmp_path: Path) -> None:
    """The resumed training is bit-equal, as in fairseq's test_mid_epoch_reproducibility."""
    architecture, save = trained
    resumed = train(architecture, tmp_path, *QUARTERS, "--restore-file", save / "checkpoint_1_2.pt")
    assert_same_parameters(torch.load(save / "checkpoint1.pt"), resumed, tolerance=0)


def test_resuming_after_an_epoch(train, architecture: str, tmp_path: Path) -> None:
    """One epoch and two resumed ones give the parameters and loss of three, as in fairseq's test_reproducibility."""
    straight = train(architecture, tmp_path / "straight", *WHOLE, "--max-epoch", 3)
    train(architecture, tmp_path / "resumed", *WHOLE, "--max-epoch", 1)
    resumed = train(architecture, tmp_path / "resumed", *WHOLE, "--max-epoch", 3)
    # Parameters are not bit-equal: fairseq orders a batch's sentences differently if a process starts at a later epoch.
    assert_same_parameters(straight, resumed, tolerance=1e-6)
    losses = [state["extra_state"]["val_loss"] for state in (straight, resumed)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


GENERATION = {
    "sampling": ["--sampling", "--temperature", 2, "--beam", 2, "--nbest", 2],
    "top-k sampling": ["--sampling", "--sampling-topk", 3, "--beam", 2, "--nbest", 2],
    "top-p sampling": ["--sampling", "--sampling-topp", 0.2, "--beam", 2, "--nbest", 2],
    "diverse siblings": ["--diversity-rate", 0.5, "--beam", 6],
    "prefixes": ["--prefix-size", 2],
    "retained dropout": ["--retain-dropout"],
    "no repetition": ["--no-repeat-ngram-size", 2],
}


@pytest.mark.parametrize("mode", GENERATION)
def test_generation(translate, data: Path, trained: tuple[str, Path], mode: str) -> None:
    """Every sentence gets the requested number of hypotheses, as in fairseq's test_generation."""
    words = GENERATION[mode]
    found = translate(trained[1], *words)
    assert sorted(found) == list(range(16))
    assert {len(beams) for beams in found.values()} == {2 if "--nbest" in words else 1}
    if mode == "prefixes":
        targets = (data.parent / "test.tgt").read_text().splitlines()
        for sentence, (text,) in found.items():
            assert text.split()[:2] == targets[sentence].split()[:2]
    if mode == "no repetition":
        for (text,) in found.values():
            bigrams = list(pairwise(text.split()))
            assert len(bigrams) == len(set(bigrams))


def test_sentences_longer_than_the_positions(train, architecture: str, tmp_path: Path) -> None:
    """The error names the option that skips long sentences; training succeeds with this option (test_max_positions)."""
    words = [*QUARTERS, "--max-target-positions", 5]
    with pytest.raises(Exception, match="--skip-invalid-size-inputs-valid-test"):
        train(architecture, tmp_path, *words)
    state = train(architecture, tmp_path, *words, "--skip-invalid-size-inputs-valid-test")
    assert state["optimizer_history"][-1]["num_updates"] > 0


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
