"""The version that checkpoints carry."""

from __future__ import annotations

import pytest
import torch


def test_a_checkpoint_of_a_newer_version_is_refused(build, architecture) -> None:
    """By name and number; what this code wrote itself is loaded."""
    model = build(architecture)
    state = model.state_dict()
    model.load_state_dict(state)
    version = int(state["version"])
    state["version"] = torch.tensor(version + 1)
    family = architecture.removesuffix("_tiny")
    assert version == (2 if family == "weighted_transformer" else 1), "with another number old checkpoints are refused"
    message = f"layout of version {version + 1} of the {family} models, and this code knows {version}"
    with pytest.raises(ValueError, match=message):
        model.load_state_dict(state)


def test_a_model_that_translates_takes_a_checkpoint_of_training(build, architecture, sentences) -> None:
    """Whose weights may be normalised."""
    trained, prepared = build(architecture, 1), build(architecture, 2)
    prepared.make_generation_fast_(need_attn=True)
    state = trained.state_dict()
    prepared.load_state_dict(state)
    source, target = sentences([5, 3]), sentences([4, 6])
    lengths = torch.tensor([5, 3], device=source.device)
    expected, actual = (model(source, lengths, target)[0] for model in (trained, prepared))
    torch.testing.assert_close(actual, expected)
