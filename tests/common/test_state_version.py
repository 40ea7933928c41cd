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
    assert version == (2 if "weighted" in architecture else 1), "with another number old checkpoints are refused"
    with pytest.raises(ValueError, match=f"version {version + 1} .* {version}"):
        model.load_state_dict(state)
