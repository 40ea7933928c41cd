"""ConvS2S section 3.5 and appendix A: initial values, which are smaller behind dropout, and weight normalisation."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from torch import nn

from tests.conftest import random_model


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
