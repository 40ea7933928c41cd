"""ConvS2S section 3.5 and appendix A: what the initialisation is for, measured."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fairseq_plugins.common.embedding import normal_embedding
from fairseq_plugins.common.linear import normalised_linear
from fairseq_plugins.convs2s.layers import GatedConvolution


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
