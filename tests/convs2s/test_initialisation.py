"""ConvS2S section 3.5 and appendix A: what the initialisation is for, measured."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fairseq_plugins.common.embedding import normal_embedding
from fairseq_plugins.common.linear import normalised_linear
from fairseq_plugins.convs2s.layers import GatedConvolution


def variances(gain: float) -> tuple[list[float], list[float]]:
    """Variance of activations and gradients after each of 20 layers, weights scaled by √(gain / 4)."""
    torch.manual_seed(1)
    layers = [GatedConvolution(256, 256, kernel=3, causal=False) for _ in range(20)]
    for layer in layers:
        layer.parametrizations.weight.original0.data.mul_(math.sqrt(gain / 4))
    x = (0.1 * torch.randn(64, 8, 256)).requires_grad_()
    outputs = [x]
    for layer in layers:
        outputs.append(layer(outputs[-1]))
        outputs[-1].retain_grad()
    outputs[-1].backward(torch.randn_like(outputs[-1]))
    # The ends of the sequence see zeros; what is meant is the middle.
    middle = slice(24, 40)
    return [float(y[middle].var()) for y in outputs], [float(y.grad[middle].var()) for y in outputs]


def test_variance_is_kept_through_twenty_layers() -> None:
    for values in variances(gain=4):
        assert all(0.5 < value / values[0] < 2 for value in values)


def test_variance_is_lost_without_the_factor_four() -> None:
    for values in variances(gain=1):
        assert min(value / max(values) for value in values) < 1e-6


@pytest.mark.parametrize("retain", [1.0, 0.7])
def test_linear(retain: float) -> None:
    torch.manual_seed(1)
    linear = normalised_linear(400, 500, retain)
    assert float(linear.weight.std()) == pytest.approx(math.sqrt(retain / 400), rel=0.02)
    assert not linear.bias.any()


@pytest.mark.parametrize("retain", [1.0, 0.7])
def test_convolution(retain: float) -> None:
    torch.manual_seed(1)
    convolution = GatedConvolution(100, 200, kernel=3, causal=True, retain=retain)
    assert float(convolution.weight.std()) == pytest.approx(math.sqrt(4 * retain / 300), rel=0.02)
    assert not convolution.bias.any()


def test_embedding() -> None:
    torch.manual_seed(1)
    embedding = normal_embedding(1000, 50, padding_idx=1)
    assert float(embedding.weight.std()) == pytest.approx(0.1, rel=0.02)
    assert not embedding.weight[1].any()


def test_everything_but_embeddings_is_weight_normalised(build) -> None:
    model = build("convs2s_tiny", encoder_layers="[(16, 3), (24, 3)]", decoder_layers="[(16, 3), (24, 3)]")
    plain = {name for name, parameter in model.named_parameters() if name.endswith("weight") and parameter.dim() > 1}
    assert {name for name in plain if "embedding.words" not in name and "embedding.positions" not in name} == set()
    assert isinstance(model.encoder.embedding.words, nn.Embedding)
