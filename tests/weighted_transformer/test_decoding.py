"""Decoding the Weighted Transformer step by step equals decoding all at once."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairseq_plugins.common.source import Source
from tests.common.stepwise import STATE, check_stepwise_equals_full, close, decodings


@st.composite
def options(draw: st.DrawFn) -> dict:
    return {
        "encoder_layers": draw(st.integers(1, 2)),
        "decoder_layers": draw(st.integers(1, 3)),
        "encoder_embed_dim": 12,
        "encoder_ffn_embed_dim": 24,
        "encoder_attention_heads": draw(st.sampled_from([1, 2, 3])),
        "decoder_attention_heads": draw(st.sampled_from([1, 2, 3])),
        "encoder_learned_pos": draw(st.booleans()),
        "decoder_learned_pos": draw(st.booleans()),
        "share_embeddings": draw(st.sampled_from(["all", "decoder", "none"])),
        "branch_gating_topk": draw(st.sampled_from([None, 1])),
    }


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(decoding=decodings(options()))
def test_stepwise_equals_full(build, sentences, decoding: dict) -> None:
    check_stepwise_equals_full(build, sentences, "weighted_transformer_tiny", decoding, check_past)


def check_past(decoding, reference, tokens: torch.Tensor, source: Source) -> None:
    """Keys and values at the places of a row's ancestors are those of the row's own tokens."""
    seen: list[torch.Tensor] = []
    hooks = [
        layer.self_attention.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        for layer in reference.decoder.layers
    ]
    reference.decoder(tokens, source)
    for hook in hooks:
        hook.remove()
    table = decoding.ancestry.table[:, :, : tokens.size(1)]  # the other columns are still empty
    sentences, beam, steps = table.shape
    places = table + torch.arange(steps, device=table.device) * beam  # (B, k, t)
    for layer, module, x in zip(decoding.layers, reference.decoder.layers, seen, strict=True):
        heads = module.self_attention.heads
        past = (layer.keys.transpose(2, 3), layer.values)
        for buffer, expected in zip(past, module.self_attention.project(x), strict=True):
            index = places.view(sentences, 1, beam * steps, 1).expand(-1, heads, -1, buffer.size(-1))
            found = buffer.gather(2, index).unflatten(2, (beam, steps)).transpose(1, 2).flatten(0, 1)
            close(found, expected)


@torch.no_grad()
def test_memory_grows_with_the_target(build, sentences) -> None:
    """Buffers exceed the target's length by at most sixteen steps or a quarter, whichever is more."""
    model = build("weighted_transformer_tiny", max_target_positions=120)
    encoded, target = model.encoder(sentences([5, 3])), sentences([120, 120])
    expected, _ = model.decoder(target, encoded)
    state: dict = {}
    for steps in range(1, 121):
        logits, _ = model.decoder(target[:, :steps], encoded, incremental_state=state)
        close(logits[:, 0], expected[:, steps - 1])
        layer = model.decoder.get_incremental_state(state, STATE).layers[0]
        assert steps <= layer.values.size(2) <= max(steps + 16, 1.25 * steps)
