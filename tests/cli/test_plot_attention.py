"""The attention of each decoder layer, and the plot of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq.models import BaseFairseqModel
from torch import Tensor

from fairseq_plugins.cli.plot_attention import attention_by_layer, draw
from tests.cli.conftest import refused, tool
from tests.repairs.payloads import untrained
from tests.search.searching import fairseq_model

LAYERS = {"decoder_layers": "[(16, 3)] * 3", "decoder_attention": "[True, False, True]"}


@pytest.fixture
def decode(sentences: Callable[..., Tensor]) -> Callable[[BaseFairseqModel], tuple[dict[int, Tensor], Tensor]]:
    """Return the layers' attention for five source and seven target tokens, and the model's attention, both (S, T)."""
    source, target = sentences([5]), sentences([7], seed=2)
    net_input = {"src_tokens": source, "src_lengths": torch.tensor([5], device=source.device)}

    def decode(model: BaseFairseqModel) -> tuple[dict[int, Tensor], Tensor]:
        model.to(source.device)
        found = attention_by_layer(model, {"net_input": net_input}, target[0])
        for attention in found.values():
            assert attention.shape == (5, 7)
            torch.testing.assert_close(attention.sum(dim=0), torch.ones(7, device=source.device))
        with torch.no_grad():
            _, extra = model(**net_input, prev_output_tokens=target.roll(1, dims=1))
        reported: Any = extra if torch.is_tensor(extra) else extra["attn"][0]
        return found, reported[0].t()

    return decode


def test_convs2s_has_attention_in_some_layers(build, decode) -> None:
    found, reported = decode(build("convs2s_tiny", **LAYERS))
    assert list(found) == [1, 3]
    assert not torch.allclose(found[1], found[3])
    torch.testing.assert_close((found[1] + found[3]) / 2, reported)


def test_the_lstm_decoder_has_one(build, decode) -> None:
    found, reported = decode(build("conv_encoder_tiny", decoder_layers=2))
    torch.testing.assert_close(found, {1: reported})


def test_the_weighted_transformer_reports_its_last_layer(build, decode) -> None:
    model = build("weighted_transformer_tiny", decoder_layers=3)
    found, _ = decode(model)
    assert list(found) == [1, 2, 3]
    for layers in (3, 2, 1):
        model.decoder.layers = model.decoder.layers[:layers]
        torch.testing.assert_close(found[layers], decode(model)[1])


def test_models_of_fairseq(task, decode) -> None:
    found, reported = decode(fairseq_model("fconv", task))
    torch.testing.assert_close(torch.stack(list(found.values())).mean(dim=0), reported)
    found, reported = decode(fairseq_model("transformer_tiny", task))
    assert list(found) == [1, 2]
    torch.testing.assert_close(found[2], reported)
    assert decode(fairseq_model("lstm", task))[0] == {}, "its attention is unknown"


def test_the_plot_of_a_long_sentence_has_a_limited_size(tmp_path: Path) -> None:
    """Some words have no label, but all other labels stay at their words; a word that looks like a formula is drawn."""
    pytest.importorskip("matplotlib")
    words = [f"w{number}" for number in range(400)]
    layers = {f"layer {number}": torch.rand(400, 50) for number in range(5)}  # a grid with an empty cell
    for kind in ("png", "svg"):
        draw([*words[:-8], "$x^$", *words[-7:]], words[:50], layers, tmp_path / f"long.{kind}")
    header = (tmp_path / "long.png").read_bytes()[16:24]
    assert max(int.from_bytes(header[:4], "big"), int.from_bytes(header[4:], "big")) <= 3000
    written = re.findall(r"<!-- (w\d+|source|translation) -->", (tmp_path / "long.svg").read_text())
    assert {"w0", "w8", "w16", "source", "translation"} <= set(written)
    assert "w1" not in written


def test_words_that_the_model_does_not_know(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A warning names words that are unknown as they are given, or as the codes split them."""
    pytest.importorskip("matplotlib")
    torch.save(untrained(data), tmp_path / "model.pt")
    plot = ["plot-attention", data, "--path", tmp_path / "model.pt"]
    plot += ["--output", tmp_path / "picture.svg", "--input"]
    tool(*plot, "w1 dog w2 cat", "--layers", 1)
    assert "dog cat" in capsys.readouterr().err
    assert "--layers: layer 99" in refused(*plot, "w1", "--layers", 1, 99)
    codes = ["--bpe-codes", tmp_path / "codes"]
    (tmp_path / "codes").write_text("#version: 0.2\n1 2</w>\n")
    tool(*plot, "w1", *codes)
    assert "w@@ 1" in capsys.readouterr().err
    (tmp_path / "codes").write_bytes(b"one word\nor three of them\n")
    assert f"{tmp_path}/codes " in refused(*plot, "w1", *codes)
