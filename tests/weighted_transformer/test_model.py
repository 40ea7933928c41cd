"""Layers and branches, compared with plain equations and with fairseq's Transformer; refused weights and options."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.models.transformer import TransformerConfig, TransformerDecoder, TransformerEncoder, base_architecture
from fairseq.modules.transformer_layer import TransformerEncoderLayerBase
from torch import nn
from torch.nn.functional import linear

from fairseq_plugins.common.source import padding_bias
from fairseq_plugins.cpu import dropout_and_loss
from fairseq_plugins.weighted_transformer.branches import BranchedBlock
from fairseq_plugins.weighted_transformer.layers import AttentionHeads
from tests.conftest import random_model


def enlivened_model(build, **options: float) -> nn.Module:
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
    model = enlivened_model(build, **{option: 1.0})
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
    """The inputs of the first layers are words times √d plus positions, which only one side learns, as in fairseq."""
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
    attention = enlivened_model(build).encoder.layers[0].attention
    x, bias = inputs(sentences)
    given = (x, x, None, True) if causal else (x, x, bias)
    expected = attention(*given)
    dropped = []
    monkeypatch.setattr(dropout_and_loss, "dropout", lambda weights, p: dropped.append(p) or weights)
    attention.dropout.p = 0.5
    torch.testing.assert_close(attention(*given), expected)
    assert dropped == [0.5] * (x.device.type == "cpu")


def block(dim: int = 12, ffn_dim: int = 24, branches: int = 3, **options: object) -> BranchedBlock:
    torch.manual_seed(1)
    settings = {
        "mode": "learned",
        "constraint": "simplex",
        "gating_topk": None,
        "dropout": 0.0,
        "relu_dropout": 0.0,
        "owner": "test",
    }
    return BranchedBlock(dim, ffn_dim, branches, **{**settings, **options})


def enlivened_block(**options: object) -> BranchedBlock:
    made = block(**options).double()
    for name, parameter in made.named_parameters():
        if "bias" in name or "norm" in name:
            torch.nn.init.normal_(parameter)
    return made


@pytest.mark.parametrize("constraint", ["simplex", "softmax"])
@pytest.mark.parametrize("gating_topk", [None, 1, 2, 3])
def test_folded_equals_plain(device: torch.device, constraint: str, gating_topk: int | None) -> None:
    """Values, and the gradients of heads, inputs and all parameters, are equal in float64."""
    made = enlivened_block(constraint=constraint, gating_topk=gating_topk).to(device)
    results = []
    for form in (made, made.plain):
        torch.manual_seed(2)
        x, heads = (torch.randn(2, 5, 12, dtype=torch.float64, device=device, requires_grad=True) for _ in range(2))
        made.zero_grad()
        out = form(x, heads)
        (out * torch.randn_like(out)).sum().backward()
        assert all(parameter.grad is not None for parameter in made.parameters())
        gradients = [parameter.grad.clone() for parameter in made.parameters()]
        results.append([out, heads.grad, x.grad, *gradients])
    for folded, plain in zip(*results, strict=True):
        torch.testing.assert_close(folded, plain, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_initial_weights_are_those_of_a_transformer_layer() -> None:
    """The largest weights, which distinguish the two kinds of initialisation, equal those of fairseq's layer."""
    cfg = TransformerConfig.from_namespace(
        Namespace(encoder_embed_dim=64, encoder_ffn_embed_dim=256, encoder_attention_heads=8)
    )
    theirs, ours, attention = TransformerEncoderLayerBase(cfg), block(64, 256, 8), AttentionHeads(64, 8, 0.0)
    keys, values = attention.key_value.weight.chunk(2)
    pairs = [
        (ours.out.weight, theirs.self_attn.out_proj),
        (ours.first.weight, theirs.fc1),
        (ours.second.weight, theirs.fc2),
        (attention.query.weight, theirs.self_attn.q_proj),
        (keys, theirs.self_attn.k_proj),
        (values, theirs.self_attn.v_proj),
    ]
    for mine, reference in pairs:
        assert mine.shape == reference.weight.shape
        assert float(mine.abs().max()) == pytest.approx(float(reference.weight.abs().max()), rel=0.01)
    assert not ours.out.bias.any()
    assert not theirs.self_attn.out_proj.bias.any()


def test_a_gate_keeps_its_k_largest_weights() -> None:
    made = enlivened_block(gating_topk=2)
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    weights, scores = made.gate(x), made.gate.projection(x)
    assert torch.equal(weights == 0, scores == scores.min(dim=-1, keepdim=True).values)
    torch.testing.assert_close(weights.sum(dim=-1), torch.full((2, 7), 2.0, dtype=torch.float64))


@pytest.mark.parametrize("sharing", ["none", "decoder"])
def test_initial_embeddings_are_those_of_a_transformer(build, sharing: str) -> None:
    """Embeddings and the output layer have mean zero and a standard deviation of d^-½."""
    model = build("weighted_transformer_tiny", enlivened=False, share_embeddings=sharing)
    for layer in (model.encoder.embedding.words, model.decoder.embedding.words, model.decoder.output_projection):
        weight = layer.weight.detach()
        assert float(weight.std()) == pytest.approx(128**-0.5, rel=0.05)
        assert float(weight.mean()) == pytest.approx(0, abs=0.005)


def test_weights_off_the_simplex_are_refused(build) -> None:
    """The check runs before validation and translation, with any criterion."""
    model = build("weighted_transformer_tiny").train()
    model.decoder.layers[0].branches.alpha.weight.data.add_(0.1)
    with pytest.raises(ValueError, match="--optimizer simplex_adam"):
        model.eval()


def test_an_optimizer_that_does_not_project_is_refused_early(build) -> None:
    """The check also runs without validation: the fifth update exceeds the tolerance, and the eighth update checks."""
    model = build("weighted_transformer_tiny")
    alpha = model.decoder.layers[0].branches.alpha.weight.data

    def train() -> None:
        for _ in range(99):
            model.train()
            alpha[0] += 0.0021

    with pytest.raises(ValueError, match="--optimizer simplex_adam"):
        train()
    assert alpha.sum() < 1 + 8 * 0.0021


def test_a_checkpoint_of_the_first_structure_is_refused(build) -> None:
    model = build("weighted_transformer_tiny")
    with pytest.raises(ValueError, match="version 1"):
        model.load_state_dict({**model.state_dict(), "version": torch.tensor(1)})


@pytest.mark.parametrize(("trained", "asked"), [("simplex", "softmax"), ("softmax", "simplex")])
@pytest.mark.parametrize("heads", [1, 4])
def test_logits_are_not_loaded_as_weights(build, trained: str, asked: str, heads: int) -> None:
    sizes = {"encoder_attention_heads": heads, "decoder_attention_heads": heads}
    state, other = (build("weighted_transformer_tiny", branch_constraint=each, **sizes) for each in (trained, asked))
    with pytest.raises(ValueError, match="--branch-constraint"):
        other.load_state_dict(state.state_dict())
    state.decoder.layers[0].branches.alpha.weight.data += 0.1  # off the simplex, but of the same constraint
    state.load_state_dict(state.state_dict())
    other = build("weighted_transformer_tiny", branch_constraint=asked, branch_weights="uniform", **sizes)
    other.load_state_dict(state.state_dict())  # accepted, because the model keeps its uniform weights


def test_different_dictionaries_are_named(dictionary: Dictionary) -> None:
    other = SimpleNamespace(source_dictionary=dictionary, target_dictionary=Dictionary())
    with pytest.raises(ValueError, match="--share-embeddings"):
        random_model("weighted_transformer_tiny", other)


def test_autocast(build, sentences, device) -> None:
    """Under autocast (--amp, here in bfloat16), parameters stay in float32, but products do not."""
    model = build("weighted_transformer_tiny").train()
    with torch.autocast(device.type, torch.bfloat16):
        logits, _ = model(sentences([5, 3]), None, sentences([4, 4]))
    assert logits.dtype == torch.bfloat16
    logits.float().square().mean().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters() if parameter.grad is not None)
