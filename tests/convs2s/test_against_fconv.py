"""Compare the whole model with fairseq's fconv, an independent implementation, with the same weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fairseq_plugins.cpu import training
from tests.common.test_generation import LENGTHS, assert_same, generate


@pytest.mark.parametrize("options", [{}, {"share_input_output_embed": True}, {"decoder_attention": "True"}])
@pytest.mark.parametrize("left_pad", [False, True])
def test_same_function(pair, sentences, options: dict[str, object], left_pad: bool) -> None:
    theirs, ours = pair(**options)
    source, target = sentences([9, 4, 7], left_pad), sentences([5, 8, 6])
    expected, attention = theirs(source, None, target)
    logits, extra = ours(source, None, target)
    torch.testing.assert_close(logits, expected)
    # fairseq divides by the number of all layers, so its attention sums to the share of layers with attention.
    share = attention.sum(dim=-1, keepdim=True)
    torch.testing.assert_close(extra["attn"][0], attention / share)
    torch.testing.assert_close(extra["attn"][0].sum(dim=-1), torch.ones_like(share[..., 0]))


def test_same_gradient(pair, sentences) -> None:
    theirs, ours = pair()
    source, target = sentences([9, 4, 7]), sentences([5, 8, 6])
    for model in (theirs, ours):
        logits, _ = model(source, None, target)
        F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=1).backward()
    names = {
        "encoder.embed_positions.weight": "encoder.embedding.positions.weight",
        "encoder.convolutions.2.weight_v": "encoder.convolutions.2.parametrizations.weight.original1",
        "encoder.fc2.weight_g": "encoder.to_embedding.parametrizations.weight.original0",
        "decoder.embed_tokens.weight": "decoder.embedding.words.weight",
        "decoder.attention.2.in_projection.weight_v": (
            "decoder.attentions.2.in_projection.parametrizations.weight.original1"
        ),
        "decoder.projections.2.bias": "decoder.shortcuts.2.projection.bias",
        "decoder.fc3.bias": "decoder.output_projection.bias",
    }
    gradients, expected = (
        {name: parameter.grad for name, parameter in model.named_parameters()} for model in (ours, theirs)
    )
    for their_name, our_name in names.items():
        torch.testing.assert_close(
            gradients[our_name], expected[their_name], msg=lambda text, n=our_name: f"{n}: {text}"
        )


def test_same_dropout_places(pair, sentences, monkeypatch) -> None:
    """A dropout of every third element hits the same places in both models, whatever their memory layouts."""

    def two_of_three(x: torch.Tensor, _: int) -> torch.Tensor:
        return torch.arange(x.numel(), device=x.device).view(x.shape) % 3 != 0

    def every_third(x: torch.Tensor, p: float, training: bool, inplace: bool = False) -> torch.Tensor:
        assert training
        assert not inplace
        return x * two_of_three(x, 0) / (1 - p)

    theirs, ours = (model.train() for model in pair(dropout=0.25))
    source, target = sentences([6, 4]), sentences([5, 3])
    monkeypatch.setattr(F, "dropout", every_third)
    monkeypatch.setattr(training, "_draw", two_of_three)
    expected, _ = theirs(source, None, target)
    logits, _ = ours(source, None, target)
    torch.testing.assert_close(logits, expected)


@torch.no_grad()
def test_ensemble_with_fconv(pair, sentences, dictionary) -> None:
    """An ensemble of two models with equal outputs has the same outputs."""
    theirs, ours = pair(decoder_attention="True")
    alone = generate([ours], dictionary, sentences(LENGTHS))
    assert_same(generate([ours, theirs], dictionary, sentences(LENGTHS)), alone)
    assert_same(generate([theirs], dictionary, sentences(LENGTHS)), alone)
