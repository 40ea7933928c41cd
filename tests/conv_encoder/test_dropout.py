"""Places of dropout in the encoders and decoder (Gehring et al. 2016, section 4.3, and between LSTM layers)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fairseq_plugins.cpu import training


@pytest.fixture(autouse=True)
def every_third(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace dropout by one that drops every third number of each vector, without scaling."""

    def drop(x: torch.Tensor, p: float) -> torch.Tensor:
        return x * (torch.arange(x.size(-1), device=x.device) % 3 != 0) if p > 0 else x

    monkeypatch.setattr(training, "dropout", drop)


def inputs(module: nn.Module) -> list[torch.Tensor]:
    """Return a list that collects the module's inputs from now on."""
    seen: list[torch.Tensor] = []
    module.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    return seen


def assert_dropped(x: torch.Tensor, expected: bool = True) -> None:
    zero = (x.flatten(0, -2) == 0).all(dim=0).tolist()
    assert zero == [expected and number % 3 == 0 for number in range(x.size(-1))]


@pytest.mark.parametrize("p", [0.5, 0.0])
def test_between_the_layers_of_a_bilstm(build, sentences, p: float) -> None:
    """Dropout applies to embeddings, to the input of each layer except the first, and to the output."""
    model = build("conv_encoder_tiny", encoder_type="bilstm", encoder_lstm_layers=3, dropout=p).train()
    layers = [[inputs(lstm) for lstm in stack] for stack in model.encoder.stacks]
    source = model.encoder(sentences([5, 5]))
    for stack in layers:
        for (x,) in stack:
            assert_dropped(x, p > 0)
    assert_dropped(source.keys, p > 0)


@pytest.mark.parametrize("p", [0.5, 0.0])
def test_between_the_lstms_of_the_decoder(build, sentences, p: float) -> None:
    """Dropout applies to embeddings, to the input of each LSTM except the first, and to the output."""
    model = build("conv_encoder_tiny", decoder_layers=3, dropout=p).train()
    decoder = model.decoder
    seen = [inputs(module) for module in (decoder.attentive, *decoder.upper, decoder.output_projection)]
    encoded = model.encoder(sentences([5, 3]))
    decoder(sentences([4, 4]), encoded)
    for (x,) in seen:
        assert_dropped(x, p > 0)


def test_on_embeddings_only(build, sentences) -> None:
    """The paper has "dropout on the embeddings and decoder outputs", and none between convolutions."""
    model = build("conv_encoder_tiny", dropout=0.5).train()
    stacks = [[inputs(layer) for layer in stack.convolutions] for stack in (model.encoder.cnn_a, model.encoder.cnn_c)]
    model.encoder(sentences([5, 5]))
    for (first,), *others in stacks:
        assert_dropped(first.transpose(1, 2))
        for (x,) in others:
            assert_dropped(x.transpose(1, 2), False)
