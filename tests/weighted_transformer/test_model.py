"""Initial weights of the Weighted Transformer, refused weights and options, and autocast."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from fairseq.data import Dictionary

from tests.conftest import random_model


@pytest.mark.parametrize("sharing", ["none", "decoder"])
def test_initial_embeddings_are_those_of_a_transformer(build, sharing: str) -> None:
    """Embeddings and the output layer have mean zero and a standard deviation of d^-½."""
    model = build("weighted_transformer_tiny", enlivened=False, share_embeddings=sharing)
    for layer in (model.encoder.embedding.words, model.decoder.embedding.words, model.decoder.output_projection):
        weight = layer.weight.detach()
        assert float(weight.std()) == pytest.approx(128**-0.5, rel=0.05)
        assert float(weight.mean()) == pytest.approx(0, abs=0.005)


def test_weights_off_the_simplex_are_refused(build) -> None:
    """The check runs before validation and translation, with any criterion."""
    model = build("weighted_transformer_tiny").train()
    model.decoder.layers[0].branches.alpha.weight.data.add_(0.1)
    with pytest.raises(ValueError, match="--optimizer simplex_adam"):
        model.eval()


def test_an_optimizer_that_does_not_project_is_refused_early(build) -> None:
    """The check also runs without validation: the fifth update exceeds the tolerance, and the eighth update checks."""
    model = build("weighted_transformer_tiny")
    alpha = model.decoder.layers[0].branches.alpha.weight.data

    def train() -> None:
        for _ in range(99):
            model.train()
            alpha[0] += 0.0021

    with pytest.raises(ValueError, match="--optimizer simplex_adam"):
        train()
    assert alpha.sum() < 1 + 8 * 0.0021


def test_a_checkpoint_of_the_first_structure_is_refused(build) -> None:
    model = build("weighted_transformer_tiny")
    with pytest.raises(ValueError, match="version 1"):
        model.load_state_dict({**model.state_dict(), "version": torch.tensor(1)})


@pytest.mark.parametrize(("trained", "asked"), [("simplex", "softmax"), ("softmax", "simplex")])
def test_logits_are_not_loaded_as_weights(build, trained: str, asked: str) -> None:
    one = {"encoder_attention_heads": 1, "decoder_attention_heads": 1}
    state, other = (build("weighted_transformer_tiny", branch_constraint=each, **one) for each in (trained, asked))
    with pytest.raises(ValueError, match=f"--branch-constraint .* trained with {trained}"):
        other.load_state_dict(state.state_dict())
    state, other = (build("weighted_transformer_tiny", branch_constraint=each) for each in (trained, asked))
    with pytest.raises(ValueError, match=f"--branch-constraint .* trained with {trained}"):
        other.load_state_dict(state.state_dict())
    plain = {**state.state_dict(), "decoder.layers.0.branches.alpha.weight": torch.tensor([0.5, 0.6, 0.2, 0.2])}
    state.load_state_dict(plain)  # off the simplex, but of the same constraint
    other = build("weighted_transformer_tiny", branch_constraint=asked, branch_weights="uniform")
    other.load_state_dict(state.state_dict())  # accepted, because the model keeps its uniform weights


def test_different_dictionaries_are_named(dictionary: Dictionary) -> None:
    other = SimpleNamespace(source_dictionary=dictionary, target_dictionary=Dictionary())
    with pytest.raises(ValueError, match="--share-embeddings"):
        random_model("weighted_transformer_tiny", other)


def test_autocast(build, sentences, device) -> None:
    """Under autocast (--amp, here in bfloat16), parameters stay in float32, but products do not."""
    model = build("weighted_transformer_tiny").train()
    with torch.autocast(device.type, torch.bfloat16):
        logits, _ = model(sentences([5, 3]), None, sentences([4, 4]))
    assert logits.dtype == torch.bfloat16
    logits.float().square().mean().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters() if parameter.grad is not None)
