"""What decoding keeps for a batch is what docs/decoding.md says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

SENTENCES, BEAM, WORDS, STEPS = 2, 3, 7, 5


def numbers(*tensors: torch.Tensor) -> int:
    """Kept in all, with what a view leaves out; a tensor that is kept under two names counts once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values()) // tensors[0].element_size()


@torch.no_grad()
def decoding(build: Any, sentences: Any, architecture: str, words: int, **options: Any) -> Any:
    """The state after some steps."""
    model = build(architecture, **options)
    model.make_generation_fast_()
    source = sentences([words] * SENTENCES)
    rows = torch.arange(SENTENCES, device=source.device).repeat_interleave(BEAM)
    encoded = model.encoder.reorder_encoder_out(model.encoder(source), rows)
    state: dict[str, Any] = {}
    model.decoder(sentences([STEPS] * SENTENCES * BEAM), encoded, incremental_state=state)
    return model.decoder.get_incremental_state(state, "decoding")


@pytest.mark.parametrize("projected", [True, False])
def test_convs2s(build, sentences, projected: bool) -> None:
    layers, width, kernel, embedding = 2, 40, 3, 12
    words = 3 if projected else 30
    sizes = {f"{side}_embed_dim": embedding for side in ("encoder", "decoder", "decoder_out")}
    stack = f"[({width}, {kernel})] * {layers}"
    state = decoding(build, sentences, "convs2s_tiny", words, decoder_layers=stack, **sizes)
    per_source = 2 * embedding + (layers * (2 * width + 1) if projected else 0)
    kept = [state.source.keys, state.source.values]
    for layer in state.layers:
        kept.append(layer.window.past)
        if layer.projected is not None:
            kept += [layer.projected.keys, layer.projected.score_bias, layer.projected.values]
    assert numbers(*kept) == SENTENCES * words * per_source + SENTENCES * BEAM * layers * kernel * width


@pytest.mark.parametrize("words", [7, 40])
def test_weighted_transformer(build, sentences, words: int) -> None:
    state = decoding(build, sentences, "weighted_transformer_tiny", words)
    layers, dim, inner, capacity = 2, 128, 512, 16
    per_source = dim + layers * (2 * dim + (inner if words < dim // 4 else 0))
    kept = [state.source.keys, state.source.values]
    for layer in state.layers:
        kept += [layer.source_keys, layer.source_values, layer.past.keys, layer.past.values]
    assert numbers(*kept) == SENTENCES * words * per_source + SENTENCES * BEAM * 2 * layers * dim * capacity
    assert state.ancestry.table.numel() == SENTENCES * BEAM * capacity


def test_conv_encoder(build, sentences) -> None:
    state = decoding(build, sentences, "conv_encoder_tiny", WORDS, decoder_layers=2)
    lstms, embedding, hidden = 2, 128, 256
    per_source = 2 * embedding + embedding + 5 * hidden + 1
    projected = state.attention
    kept = [state.source.keys, state.source.values, projected.keys, projected.bias, projected.values]
    kept += [part for lstm in state.lstms for part in (lstm.h, lstm.cell)]
    assert numbers(*kept) == SENTENCES * WORDS * per_source + SENTENCES * BEAM * lstms * 2 * hidden
