"""Output layers that predict only candidate words of the vocabulary (L'Hostis et al. 2016, arXiv 1610.00072).

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

from fairseq_plugins.common.weight_norm import Linear, Normalised
from fairseq_plugins.cpu.packing import BatchWeights

ModuleT = TypeVar("ModuleT", bound=nn.Module)

# Names of the output layer.  This plugin's decoders and fairseq's transformer use the first name, fairseq's fconv uses
# the second, and fairseq's lstm uses the third.
_NAMES = ("output_projection", "fc3", "fc_out")

_SOFTMAX_OF_MODELS = (BaseFairseqModel.get_normalized_probs, TransformerModelBase.get_normalized_probs)


def has_plain_softmax(model: BaseFairseqModel) -> bool:
    """Return whether the model's probabilities are a softmax of the decoder's output, computed by fairseq's methods."""
    decoder = model.decoder
    return (
        decoder.adaptive_softmax is None
        and type(model).get_normalized_probs in _SOFTMAX_OF_MODELS
        and type(decoder).get_normalized_probs is FairseqDecoder.get_normalized_probs
        and type(decoder).get_normalized_probs_scriptable is FairseqDecoder.get_normalized_probs_scriptable
    )


@contextmanager
def candidate_output(model: nn.Module, candidates: Tensor) -> Iterator[None]:
    """Within the ``with`` block, make the model's decoder predict only candidate words: output i is candidate i.

    Use this function in training.  Other threads must not use the model at the same time, because this function
    modifies it.  The candidates' rows of the output layer are selected once, at the start of the ``with`` block.
    Gradients reach the model's parameters.  Input tokens remain indices of the dictionary.  The model may be inside a
    wrapper for distributed training.
    """
    name, selected = _selected(model, candidates)
    decoder: Any = model.decoder
    layer = getattr(decoder, name)
    setattr(decoder, name, selected)
    try:
        yield
    finally:
        setattr(decoder, name, layer)


def with_candidate_output(model: ModuleT, candidates: Tensor, batch_weights: BatchWeights | None = None) -> ModuleT:
    """Return a copy of the model whose output i is the i-th candidate; the copy shares all other parts with the model.

    Use this function in translation.  Other threads can use the model at the same time, because this function does not
    modify it.
    """
    name, selected = _selected(model, candidates)
    selected.batch_weights = batch_weights
    decoder: Any = model.decoder
    return with_part(model, "decoder", with_part(decoder, name, selected))


def with_part(module: ModuleT, name: str, part: nn.Module) -> ModuleT:
    """Return a shallow copy of a module with its submodule ``name`` replaced by ``part``."""
    twin = copy.copy(module)
    twin._modules = {**module._modules, name: part}
    return twin


def selected_rows(linear: nn.Module, rows: Tensor) -> Linear:
    """Return a linear map that computes only selected outputs of ``linear``, (..., K) -> (..., n).

    Gradients reach the parameters of ``linear``.  The result stores its weight and bias as buffers; copies of a model
    share buffers and parameters.  The weight of ``linear`` may be normalised per row, by this plugin or by torch's
    `weight_norm`.  The output for a negative index is minus infinity.
    """
    found = rows.clamp(min=0)
    weight, *magnitude = (part.index_select(0, found) for part in _parts(linear))
    if magnitude:
        weight = torch._weight_norm(weight, magnitude[0], 0)
    bias: Any = linear.bias
    bias = weight.new_zeros(len(rows)) if bias is None else bias.index_select(0, found)
    selected = Linear(weight.size(1), len(rows), device="meta")
    del selected._parameters["weight"], selected._parameters["bias"]  # buffers instead
    selected.register_buffer("weight", weight, persistent=False)
    selected.register_buffer("bias", bias.masked_fill(rows < 0, -torch.inf), persistent=False)
    return selected


def _selected(model: nn.Module, candidates: Tensor) -> tuple[str, Linear]:
    """Return the name of the decoder's output layer, and a copy of this layer that predicts only the candidates."""
    decoder = getattr(model, "decoder", None)
    name = next((name for name in _NAMES if getattr(decoder, name, None) is not None), None)
    if name is None:
        raise ValueError(
            f"--candidates: {type(decoder or model).__name__} has no linear output layer; use a model whose output "
            "layer is neither an adaptive softmax nor an embedding"
        )
    try:
        return name, selected_rows(getattr(decoder, name), candidates)
    except ValueError as error:
        raise ValueError(f"--candidates: {name} of {type(decoder).__name__}: {error}") from error


def _parts(module: nn.Module) -> tuple[Tensor, ...]:
    """Return a plain weight, (V, K), or a normalised weight's direction, (V, K), and magnitude, (V, 1)."""
    if isinstance(module, nn.Linear) and type(module).forward in (Linear.forward, nn.Linear.forward):
        map_: Any = module
        match list(map_._forward_pre_hooks.values()), getattr(map_, "normalised", None):
            case [], Normalised(dim=0) as normalised:
                return normalised.original1, normalised.original0
            case [], None if not hasattr(map_, "parametrizations"):
                return (map_.weight,)
            case [WeightNorm(name="weight", dim=0)], None:
                return map_.weight_v, map_.weight_g
    raise ValueError(
        f"expected a linear map with a plain or row-normalised weight, got {type(module).__name__}; leave out "
        "--candidates"
    )
