"""A model that computes the probabilities of some words only (L'Hostis et al. 2016, arXiv 1610.00072)."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn

from fairseq_plugins.models.translation_model import TranslationModel
from fairseq_plugins.nn.selected_rows import selected_rows

__all__ = ["among", "narrowed", "with_part"]

ModelT = TypeVar("ModelT", bound=nn.Module)

# What decoders call their output layer: those here and fairseq's transformer, its fconv, its lstm.
_NAMES = ("output_projection", "fc3", "fc_out")


@contextmanager
def narrowed(model: nn.Module, candidates: Tensor) -> Iterator[None]:
    """Within this context the model's decoder predicts over the candidates, numbered in their order.

    For training, where a model may be wrapped and only one thread has it.  The candidates' weights are taken when the
    context is entered; gradients go to the model's parameters.  What the decoder reads is not touched: it takes words
    by their numbers in the dictionary.

    Args:
        model: an encoder-decoder, which may be wrapped for distributed training.
        candidates: words of the target dictionary, (n,).

    Raises:
        ValueError: the decoder has no output layer that is a plain linear map.
    """
    name, selected = _selected(model, candidates)
    decoder: Any = model.decoder
    layer = getattr(decoder, name)
    setattr(decoder, name, selected)
    try:
        yield
    finally:
        setattr(decoder, name, layer)


def among(model: ModelT, candidates: Tensor) -> ModelT:
    """A twin that predicts over the candidates, numbered in their order, and shares all else with the model.

    For translation: the model stays as it is, for whoever else translates with it.  Otherwise as `narrowed`.
    """
    name, selected = _selected(model, candidates)
    decoder: Any = model.decoder
    return with_part(model, "decoder", with_part(decoder, name, selected))


def _selected(model: nn.Module, candidates: Tensor) -> tuple[str, nn.Linear]:
    """What the decoder calls its output layer, and that layer for the candidates alone."""
    decoder = getattr(model, "decoder", None)
    name = next((name for name in _NAMES if getattr(decoder, name, None) is not None), None)
    if name is None:
        raise ValueError(
            f"{type(decoder or model).__name__} cannot predict among candidates: it has no linear output layer (with "
            "an adaptive softmax, or one that is an embedding, there is none)"
        )
    try:
        selected = selected_rows(getattr(decoder, name), candidates)
    except ValueError as error:
        raise ValueError(f"{type(decoder).__name__} cannot predict among candidates: its {name}: {error}") from error
    TranslationModel.accelerate_(selected)
    return name, selected


def with_part(module: ModelT, name: str, part: nn.Module) -> ModelT:
    """A twin with another part of this name, which shares all else."""
    twin = copy.copy(module)
    twin._modules = {**module._modules, name: part}
    return twin
