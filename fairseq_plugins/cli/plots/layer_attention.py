"""The attention to the source of each decoder layer, for the models of this plugin and of fairseq."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from fairseq.models import BaseFairseqModel
from fairseq.models.fconv import AttentionLayer
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from fairseq_plugins.common.model import IncrementalDecoder


def attention_by_layer(model: BaseFairseqModel, sample: dict[str, Any], target: Tensor) -> dict[int, Tensor]:
    """Decode a known translation of one sentence and see what its layers attend to.

    Args:
        model: an encoder-decoder in eval mode, which has not been prepared for inference.
        sample: a batch of the sentence alone, as fairseq's generators take it.
        target: the translation, (T,), its end included.

    Returns:
        for each layer that attends, numbered from 1, its attention (S, T), averaged over heads; empty where the model's
        kind of attention is not known.
    """
    found: dict[int, Tensor] = {}
    with ExitStack() as hooks, torch.no_grad():
        for number, module in _attending(model.decoder):

            def keep(module: Any, inputs: tuple[Any, ...], output: Any, number: int = number) -> None:
                weights = module.weights(*inputs) if hasattr(module, "weights") else output[1]
                # Of fairseq's Transformer heads come first, and only from the layer that it reports.
                found[number] = weights.float().view(-1, *weights.shape[-2:]).mean(dim=0).t()

            hooks.callback(module.register_forward_hook(keep).remove)
        previous = target.roll(1).unsqueeze(0)  # its end comes first
        model(**sample["net_input"], prev_output_tokens=previous)
    return found


def _attending(decoder: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    """Yield the modules that attend to the source, with the number of their layer."""
    if isinstance(decoder, IncrementalDecoder):
        yield from decoder.attention_modules().items()
        return
    for name, module in decoder.named_modules():  # of fairseq's fconv and Transformer
        if isinstance(module, AttentionLayer) or (
            isinstance(module, MultiheadAttention) and module.encoder_decoder_attention
        ):
            number = re.search(r"\d+", name)
            yield (int(number[0]) + 1 if number else 1), module
