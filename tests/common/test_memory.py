"""A sentence's decode-time state has the size given in docs/internals.md: O(S), plus O(T) for kept keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

BEAM = 3
ROOT_OF_LENGTH = 1


def tensors(kept: Any) -> Iterator[Tensor]:
    """Yield the tensors of an object and its parts, except those of modules and the packed weights of functions."""
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
    """Return the number of elements, counting each storage once and as a whole."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() // tensor.element_size()
        for tensor in tensors(kept)
        if tensor.is_floating_point()
    }
    return sum(storages.values())


@pytest.fixture
def kept(build, sentences) -> Callable[..., int]:
    """Return ``kept(architecture, words, steps, option=value, ...)``: a sentence's numbers in the decode-time state."""

    @torch.no_grad()
    def kept(architecture: str, words: int, steps: int, **options: Any) -> int:
        model = build(architecture, **options)
        model.make_generation_fast_()
        found = []
        for count in (2, 3):  # the difference is one sentence, without numbers that all sentences share
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


def convs2s(words: int, steps: int) -> int:
    layers, width, kernel, embedding = 2, 40, 3, 12
    projected, bias = layers * (2 * width + 1), 1
    return words * (2 * embedding + bias + projected) + BEAM * layers * kernel * width


def weighted_transformer(words: int, steps: int) -> int:
    layers, dim, inner, bias, capacity = 2, 128, 512, 1, {5: 16, 40: 48}[steps]
    per_source = dim + bias + layers * (2 * dim + (inner if words < dim // 4 else 0))
    return words * per_source + BEAM * 2 * layers * dim * capacity


def conv_encoder(words: int, steps: int) -> int:
    lstms, embedding, hidden, bias, projected_bias = 2, 128, 256, 1, 1
    return words * (2 * embedding + bias + embedding + 5 * hidden + projected_bias) + BEAM * lstms * 2 * hidden


SIZES = {f"{side}_embed_dim": 12 for side in ("encoder", "decoder", "decoder_out")}
FAMILIES = {
    "convs2s_tiny": (convs2s, {"decoder_layers": "[(40, 3)] * 2", **SIZES}),
    "weighted_transformer_tiny": (weighted_transformer, {}),
    "conv_encoder_tiny": (conv_encoder, {"decoder_layers": 2}),
}


@pytest.mark.parametrize("steps", [5, 40])
@pytest.mark.parametrize("words", [7, 40])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_numbers_for_a_sentence(kept, architecture: str, words: int, steps: int) -> None:
    expected, options = FAMILIES[architecture]
    assert kept(architecture, words, steps, **options) == expected(words, steps) + ROOT_OF_LENGTH
