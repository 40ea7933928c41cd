"""Weight normalisation and its removal."""

from __future__ import annotations

import torch
from torch import nn

from fairseq_plugins.common.linear import (
    fold_weight_norm_,
    has_weight_norm,
    normalised_linear,
    remove_weight_norm_,
    without_weight_norm,
)
from fairseq_plugins.convs2s.layers import GatedConvolution


def network() -> nn.ModuleList:
    torch.manual_seed(1)
    modules = nn.ModuleList(
        [normalised_linear(5, 4), normalised_linear(5, 1), GatedConvolution(3, 2, kernel=4, causal=True)]
    )
    for module in modules:
        module.parametrizations.weight.original0.data.uniform_(0.5, 2)
    return modules


def test_a_copy_without_weight_norm_is_independent_of_the_original() -> None:
    original = network()
    weights = [module.weight.detach().clone() for module in original]
    shared = object()
    original.shared = shared
    original.register_buffer("table", torch.ones(3))
    twin = without_weight_norm(original, shared)
    assert twin.table is original.table  # other tensors, which may be large, are shared
    assert twin[0].bias is original[0].bias
    assert not has_weight_norm(twin)
    assert has_weight_norm(original)
    assert twin.shared is shared
    for module in original:
        module.parametrizations.weight.original1.data.add_(1)
    for weight, mine, theirs in zip(weights, original, twin, strict=True):
        assert torch.equal(theirs.weight, weight)
        assert not torch.allclose(mine.weight, weight)
        assert theirs.bias is mine.bias


def test_a_training_checkpoint_folds_to_the_same_weights() -> None:
    original, prepared = network(), network()
    remove_weight_norm_(prepared)
    for module in original:
        module.parametrizations.weight.original1.data.normal_()
    state = dict(original.state_dict())
    fold_weight_norm_(state, prepared)
    prepared.load_state_dict(state)
    for mine, theirs in zip(original, prepared, strict=True):
        torch.testing.assert_close(theirs.weight, mine.weight)
