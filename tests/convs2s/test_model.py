"""The whole model, compared with fairseq's fconv; initial values (section 3.5 and appendix A)."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fairseq.models.fconv import FConvModel
from torch import nn

from fairseq_plugins.convs2s.fconv import convert_options, convert_parameters
from fairseq_plugins.convs2s.model import ConvS2SModel
from fairseq_plugins.cpu import dropout_and_loss
from tests.conftest import enliven, random_model

SMALL = {
    "encoder_embed_dim": 12,
    "decoder_embed_dim": 12,
    "decoder_out_embed_dim": 12,
    "encoder_layers": "[(16, 3)] * 2 + [(24, 4)] + [(16, 1, 2)]",
    "decoder_layers": "[(16, 3)] * 2 + [(24, 2)] + [(16, 4, 2)] + [(8, 1, 0)]",
    "decoder_attention": "[True, False, True, True, True]",
}


@pytest.fixture
def pair(task: SimpleNamespace, device: torch.device) -> Callable[..., tuple[FConvModel, ConvS2SModel]]:
    """Return ``pair(option=value, ...)``, which builds both models with the same random weights, in eval mode."""

    def pair(**options: Any) -> tuple[FConvModel, ConvS2SModel]:
        args, theirs = random_model("fconv", task, **{**SMALL, **options})
        enliven(theirs)
        parameters = theirs.state_dict()
        ours = ConvS2SModel.build_model(Namespace(**convert_options(args, parameters)), task)
        ours.load_state_dict(convert_parameters(parameters))
        return theirs.to(device).eval(), ours.to(device).eval()

    return pair


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
    monkeypatch.setattr(dropout_and_loss, "_draw", two_of_three)
    expected, _ = theirs(source, None, target)
    logits, _ = ours(source, None, target)
    torch.testing.assert_close(logits, expected)


def test_everything_but_embeddings_is_weight_normalised(build) -> None:
    model = build("convs2s_tiny", encoder_layers="[(16, 3), (24, 3)]", decoder_layers="[(16, 3), (24, 3)]")
    plain = {name for name, parameter in model.named_parameters() if name.endswith("weight") and parameter.dim() > 1}
    assert {name for name in plain if "embedding.words" not in name and "embedding.positions" not in name} == set()
    assert isinstance(model.encoder.embedding.words, nn.Embedding)


@pytest.mark.parametrize(
    ("part", "kept"),
    [
        ("encoder.from_embedding", 0.25),
        ("encoder.convolutions.0", 0.25),
        ("encoder.to_embedding", 1),
        ("decoder.from_embedding", 0.25),
        ("decoder.convolutions.0", 0.25),
        ("decoder.to_embedding", 1),
        ("decoder.output_projection", 0.25),
    ],
)
def test_maps_behind_dropout_are_drawn_smaller(build, part: str, kept: float) -> None:
    module: nn.Module = build("convs2s_tiny", dropout=0.75).get_submodule(part)
    weight = module.weight  # a convolution's has the shape (kernel, width, twice the width)
    gain, inputs = (4, weight.size(0) * weight.size(1)) if weight.dim() == 3 else (1, weight.size(1))
    assert float(weight.std()) == pytest.approx(math.sqrt(gain * kept / inputs), rel=0.1)


@pytest.mark.parametrize("tied", [False, True])
def test_all_biases_are_zero_at_first(task, tied: bool) -> None:
    """Biases of an output layer that shares its weights with the embeddings are zero, too."""
    _, model = random_model("convs2s_tiny", task, share_input_output_embed=tied)
    biases = [value for name, value in model.named_parameters() if name.endswith("bias")]
    assert len(biases) > 10
    assert not any(bias.any() for bias in biases)


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_positions_are_left_out_of_one_side(build, side: str) -> None:
    whole, without = (
        dict(build("convs2s_tiny", **{f"no_{side}_positional_embeddings": leave_out}).named_parameters())
        for leave_out in (False, True)
    )
    assert set(whole) - set(without) == {f"{side}.embedding.positions.weight"}


def test_each_side_has_its_own_pretrained_embeddings(build, dictionary, tmp_path: Path) -> None:
    paths = {}
    for side, numbers in (("encoder", "1 2"), ("decoder", "3 4")):
        paths[f"{side}_embed_path"] = str(tmp_path / side)
        (tmp_path / side).write_text(f"1 2\nw7 {numbers}\n")
    model = build("convs2s_tiny", enlivened=False, encoder_embed_dim=2, decoder_embed_dim=2, **paths)
    found = [part.embedding.words.weight[dictionary.index("w7")].tolist() for part in (model.encoder, model.decoder)]
    assert found == [[1, 2], [3, 4]]
