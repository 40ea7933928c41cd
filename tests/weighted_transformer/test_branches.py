"""Compare the folded branches with their plain equations, and the initial weights with fairseq's Transformer."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch
from fairseq.models.transformer import TransformerConfig
from fairseq.modules.transformer_layer import TransformerEncoderLayerBase

from fairseq_plugins.weighted_transformer.branches import BranchedBlock
from fairseq_plugins.weighted_transformer.layers import AttentionHeads


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


def enlivened(**options: object) -> BranchedBlock:
    made = block(**options).double()
    for name, parameter in made.named_parameters():
        if "bias" in name or "norm" in name:
            torch.nn.init.normal_(parameter)
    return made


@pytest.mark.parametrize("constraint", ["simplex", "softmax"])
@pytest.mark.parametrize("gating_topk", [None, 1, 2, 3])
def test_folded_equals_plain(device: torch.device, constraint: str, gating_topk: int | None) -> None:
    """Values, and the gradients of heads, inputs and all parameters, are equal in float64."""
    made = enlivened(constraint=constraint, gating_topk=gating_topk).to(device)
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
    made = enlivened(gating_topk=2)
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    weights, scores = made.gate(x), made.gate.projection(x)
    assert torch.equal(weights == 0, scores == scores.min(dim=-1, keepdim=True).values)
    torch.testing.assert_close(weights.sum(dim=-1), torch.full((2, 7), 2.0, dtype=torch.float64))
