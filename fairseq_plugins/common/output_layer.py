"""Output layers for some words of the vocabulary (L'Hostis et al. 2016, arXiv 1610.00072).

V outputs, K inputs, n selected outputs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from fairseq.models import BaseFairseqModel, FairseqDecoder
from fairseq.models.transformer import TransformerModelBase
from torch import Tensor, nn
from torch.nn.utils.weight_norm import WeightNorm

from fairseq_plugins.common.linear import Linear, Normalised
from fairseq_plugins.cpu.packing import BatchPacking

ModuleT = TypeVar("ModuleT", bound=nn.Module)

# What decoders call their output layer: those here and fairseq's transformer, its fconv, its lstm.
_NAMES = ("output_projection", "fc3", "fc_out")

_SOFTMAX_OF_MODELS = (BaseFairseqModel.get_normalized_probs, TransformerModelBase.get_normalized_probs)


def has_plain_softmax(model: BaseFairseqModel) -> bool:
    """Return whether the model's probabilities are the softmax of its decoder's output, by fairseq's own methods."""
    decoder = model.decoder
    return (
        decoder.adaptive_softmax is None
        and type(model).get_normalized_probs in _SOFTMAX_OF_MODELS
        and type(decoder).get_normalized_probs is FairseqDecoder.get_normalized_probs
        and type(decoder).get_normalized_probs_scriptable is FairseqDecoder.get_normalized_probs_scriptable
    )


@contextmanager
def candidate_output(model: nn.Module, candidates: Tensor) -> Iterator[None]:
    """Within this context the model's decoder predicts over the candidates, numbered in their order.

    For training, where a model may be wrapped and only one thread has it.  The candidates' weights are taken when the
    context is entered; gradients go to the model's parameters.  The decoder's input stays in the dictionary's numbers.

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


def with_candidate_output(model: ModuleT, candidates: Tensor, packing: BatchPacking | None = None) -> ModuleT:
    """Return a twin that predicts over the candidates, numbered in their order, and shares all else with the model.

    For translation: the model stays as it is, for whoever else translates with it.  Otherwise as `candidate_output`;
    ``packing`` is as in `linear`.
    """
    name, selected = _selected(model, candidates)
    selected.packing = packing
    decoder: Any = model.decoder
    return with_part(model, "decoder", with_part(decoder, name, selected))


def with_part(module: ModuleT, name: str, part: nn.Module) -> ModuleT:
    """Return a twin with another part of this name, which shares all else."""
    twin = copy.copy(module)
    twin._modules = {**module._modules, name: part}
    return twin


def selected_rows(linear: nn.Module, rows: Tensor) -> Linear:
    """Return the map from x, (..., K), to the selected outputs of a linear map, (..., n), as that is now.

    Gradients go to its parameters.  A normalised weight has a norm for each row, so only the selected rows are
    normalised.  Weight and bias are buffers, so that a copy of the module around this one can share them as it shares
    parameters.

    Args:
        linear: a map with a weight (V, K), which may be normalised by row, in our way or by torch's hook.
        rows: the outputs wanted, (n,); minus infinity comes out where a number is negative.

    Raises:
        ValueError: the map is not linear, or its weight is computed in some other way.
    """
    found = rows.clamp(min=0)
    weight, *magnitude = (part.index_select(0, found) for part in _parts(linear))
    if magnitude:
        weight = torch._weight_norm(weight, magnitude[0], 0)
    bias: Any = linear.bias
    bias = weight.new_zeros(len(rows)) if bias is None else bias.index_select(0, found)
    selected = Linear(weight.size(1), len(rows), device="meta")
    del selected._parameters["weight"], selected._parameters["bias"]  # no parameters of its own
    selected.register_buffer("weight", weight, persistent=False)
    selected.register_buffer("bias", bias.masked_fill(rows < 0, -torch.inf), persistent=False)
    return selected


def _selected(model: nn.Module, candidates: Tensor) -> tuple[str, Linear]:
    """Return the name of the decoder's output layer, and that layer for the candidates alone."""
    decoder = getattr(model, "decoder", None)
    name = next((name for name in _NAMES if getattr(decoder, name, None) is not None), None)
    if name is None:
        raise ValueError(
            f"{type(decoder or model).__name__} cannot predict among candidates: it has no linear output layer (with "
            "an adaptive softmax, or one that is an embedding, there is none)"
        )
    try:
        return name, selected_rows(getattr(decoder, name), candidates)
    except ValueError as error:
        raise ValueError(f"{type(decoder).__name__} cannot predict among candidates: its {name}: {error}") from error


def _parts(module: nn.Module) -> tuple[Tensor, ...]:
    """Return the row-wise parts of the weight: itself, (V, K), or its direction, (V, K), and magnitude, (V, 1)."""
    if isinstance(module, nn.Linear) and type(module).forward in (Linear.forward, nn.Linear.forward):
        map_: Any = module
        match list(map_._forward_pre_hooks.values()), getattr(map_, "normalised", None):
            case [], Normalised(dim=0) as normalised:
                return normalised.original1, normalised.original0
            case [], None if not hasattr(map_, "parametrizations"):
                return (map_.weight,)
            case [WeightNorm(name="weight", dim=0)], None:
                return map_.weight_v, map_.weight_g
    raise ValueError(f"{type(module).__name__} is not a linear map with a weight that is plain or normalised by row")
