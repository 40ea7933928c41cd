"""A model that for a while computes the probabilities of some words only (L'Hostis et al. 2016, arXiv 1610.00072)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from fairseq_plugins.nn.selected_rows import SelectedRows

__all__ = ["narrowed"]

# What decoders call their output layer: those here and fairseq's transformer, its fconv, its lstm.
_NAMES = ("output_projection", "fc3", "fc_out")


@contextmanager
def narrowed(model: nn.Module, candidates: Tensor) -> Iterator[None]:
    """Within this context the model's decoder predicts over the candidates, numbered in their order.

    Their weights are taken when the context is entered; gradients go to the model's parameters.  What the decoder reads
    is not touched: it takes words by their numbers in the dictionary.

    Args:
        model: an encoder-decoder, which may be wrapped for distributed training.
        candidates: words of the target dictionary, (n,).

    Raises:
        ValueError: the decoder has no output layer that is a plain linear map.
    """
    decoder = getattr(model, "decoder", None)
    name = next((name for name in _NAMES if getattr(decoder, name, None) is not None), None)
    if decoder is None or name is None:
        raise ValueError(
            f"{type(decoder or model).__name__} cannot predict among candidates: it has no linear output layer (with "
            "an adaptive softmax, or one that is an embedding, there is none)"
        )
    layer = getattr(decoder, name)
    try:
        selected = SelectedRows(layer, candidates)
    except ValueError as error:
        raise ValueError(f"{type(decoder).__name__} cannot predict among candidates: its {name}: {error}") from error
    setattr(decoder, name, selected)
    try:
        yield
    finally:
        setattr(decoder, name, layer)
