"""Dropout in the layers, compared with formulas for a rate of 1, and embeddings, compared with fairseq's."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch
from fairseq.models.transformer import TransformerDecoder, TransformerEncoder, base_architecture
from torch import nn
from torch.nn.functional import linear

from fairseq_plugins.common.source import padding_bias
from fairseq_plugins.cpu import training


def enlivened(build, **options: float) -> nn.Module:
    """Build a model in training mode whose only dropout is the given one."""
    model = build("weighted_transformer_tiny", **{"dropout": 0.0, "attention_dropout": 0.0, **options}).double().train()
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            nn.init.normal_(parameter)
    return model


def inputs(sentences) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    padding = sentences([5, 3]).eq(1)
    x = torch.randn(2, 5, 128, dtype=torch.float64)
    return x.to(padding.device), padding_bias(padding, torch.float64).unsqueeze(1)


@pytest.mark.parametrize("option", ["dropout", "attention_dropout", "relu_dropout"])
def test_dropout_in_a_decoder_layer(build, sentences, option: str) -> None:
    model = enlivened(build, **{option: 1.0})
    layer, source = model.decoder.layers[0], model.encoder(sentences([5, 3]))
    x, _ = inputs(sentences)
    branches = layer.branches
    if option == "dropout":
        expected = branches.norm(branches.attention_norm(layer.self_attention_norm(x)))
    elif option == "attention_dropout":
        x_1 = layer.self_attention_norm(x + layer.self_attention_out.bias)
        expected = branches.plain(x_1, torch.zeros_like(x))
    else:
        out = layer.self_attention_out(layer.self_attention(x, x, causal=True))
        x_1 = layer.self_attention_norm(x + out)
        heads = layer.source_attention(x_1, source.values, source.bias.unsqueeze(1))
        u = branches.attention_norm(x_1 + linear(heads, branches.fold().out, branches.out.bias))
        expected = branches.norm(u + branches.second.bias)
    torch.testing.assert_close(layer(x, source)[0], expected)


@pytest.mark.parametrize("left_pad", [False, True])
@pytest.mark.parametrize("learned", [False, True])
@torch.no_grad()
def test_embeddings_are_fairseqs(build, sentences, dictionary, left_pad: bool, learned: bool) -> None:
    """The first inputs of encoder and decoder layers are words times √d plus positions, as in fairseq.

    Only one side has learned positions.
    """
    positions = {"encoder_learned_pos": learned, "decoder_learned_pos": not learned}
    model = build("weighted_transformer_tiny", **positions)
    args = Namespace(encoder_embed_dim=128, encoder_layers=0, decoder_layers=0, **positions)
    args.max_source_positions = args.max_target_positions = 64
    base_architecture(args)
    tokens = sentences([7, 4, 1], left_pad)
    present = tokens.ne(dictionary.pad())
    for ours, kind in ((model.encoder.embedding, TransformerEncoder), (model.decoder.embedding, TransformerDecoder)):
        theirs = kind(args, dictionary, ours.words).to(tokens.device).eval()
        if positions["encoder_learned_pos" if kind is TransformerEncoder else "decoder_learned_pos"]:
            theirs.embed_positions.weight.copy_(ours.positions.weight)
        if kind is TransformerEncoder:
            expected, _ = theirs.forward_embedding(tokens)
        else:
            expected, _ = theirs.extract_features(tokens, None)
        torch.testing.assert_close(ours(tokens)[present], expected[present])


@pytest.mark.parametrize("causal", [False, True])
def test_attention_with_dropout(build, sentences, monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
    """The attention with dropout equals torch's attention if the dropout happens to drop nothing."""
    attention = enlivened(build).encoder.layers[0].attention
    x, bias = inputs(sentences)
    given = (x, x, None, True) if causal else (x, x, bias)
    expected = attention(*given)
    dropped = []
    monkeypatch.setattr(training, "dropout", lambda weights, p: dropped.append(p) or weights)
    attention.dropout.p = 0.5
    torch.testing.assert_close(attention(*given), expected)
    assert dropped == [0.5] * (x.device.type == "cpu")
