"""What decoding keeps for a sentence is what docs/internals.md says: O(S), and O(T) where keys and values are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

BEAM = 3
ROOT_OF_LENGTH = 1


def tensors(kept: Any) -> Iterator[Tensor]:
    """Those that an object and its parts hold, without those of modules and the packed weights of functions."""
    if isinstance(kept, Tensor):
        yield kept
    elif isinstance(kept, dict):
        yield from tensors(list(kept.values()))
    elif isinstance(kept, (list, tuple)):
        for part in kept:
            yield from tensors(part)
    elif hasattr(kept, "__dict__") and not isinstance(kept, nn.Module):
        yield from tensors(vars(kept))


def numbers(kept: Any) -> int:
    """How many in all, with what a view leaves out; what is kept under two names counts once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() // tensor.element_size()
        for tensor in tensors(kept)
        if tensor.is_floating_point()
    }
    return sum(storages.values())


@pytest.fixture
def kept(build, sentences) -> Callable[..., int]:
    """``kept(architecture, words, steps, option=value, ...)``: numbers for a sentence of so many words."""

    @torch.no_grad()
    def kept(architecture: str, words: int, steps: int, **options: Any) -> int:
        model = build(architecture, **options)
        model.make_generation_fast_()
        found = []
        for count in (2, 3):  # the difference is one sentence, without what is kept for all together
            source = sentences([words] * count)
            rows = torch.arange(count, device=source.device).repeat_interleave(BEAM)
            encoded = model.encoder.reorder_encoder_out(model.encoder(source), rows)
            state: dict[str, Any] = {}
            tokens = sentences([steps] * count * BEAM)
            for step in range(steps):
                model.decoder(tokens[:, : step + 1], encoded, incremental_state=state)
            found.append(numbers(state))
        return found[1] - found[0]

    return kept


@pytest.mark.parametrize("steps", [5, 40])
@pytest.mark.parametrize("words", [3, 30])
def test_convs2s(kept, words: int, steps: int) -> None:
    layers, width, kernel, embedding = 2, 40, 3, 12
    sizes = {f"{side}_embed_dim": embedding for side in ("encoder", "decoder", "decoder_out")}
    found = kept("convs2s_tiny", words, steps, decoder_layers=f"[({width}, {kernel})] * {layers}", **sizes)
    projected, bias = layers * (2 * width + 1), 1
    assert found == words * (2 * embedding + bias + projected) + ROOT_OF_LENGTH + BEAM * layers * kernel * width


@pytest.mark.parametrize(("steps", "capacity"), [(5, 16), (40, 48)])
@pytest.mark.parametrize("words", [7, 40])
def test_weighted_transformer(kept, words: int, steps: int, capacity: int) -> None:
    layers, dim, inner, bias = 2, 128, 512, 1
    per_source = dim + bias + layers * (2 * dim + (inner if words < dim // 4 else 0))
    found = kept("weighted_transformer_tiny", words, steps)
    assert found == words * per_source + ROOT_OF_LENGTH + BEAM * 2 * layers * dim * capacity


@pytest.mark.parametrize("steps", [5, 40])
@pytest.mark.parametrize("words", [7, 40])
def test_conv_encoder(kept, words: int, steps: int) -> None:
    lstms, embedding, hidden = 2, 128, 256
    bias, projected_bias = 1, 1
    per_source = 2 * embedding + bias + embedding + 5 * hidden + projected_bias
    found = kept("conv_encoder_tiny", words, steps, decoder_layers=lstms)
    assert found == words * per_source + ROOT_OF_LENGTH + BEAM * lstms * 2 * hidden
