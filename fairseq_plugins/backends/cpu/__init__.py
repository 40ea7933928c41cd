"""What makes a model fast on a processor: other forms of its modules and of its decoding, and nothing else.

| file | what it holds | plain twin |
|---|---|---|
| `linear` | products through oneDNN, where that is faster than MKL | `torch.nn.Linear` |
| `products`, `packing` | weights laid out for products without gradients, in three precisions, and how long they are kept | `torch.nn.functional.linear` |
| `convolution`, `winograd` | convolutions as products of windows, or in pairs of outputs | `nn.gated_convolution` |
| `branches` | folded weights that are kept, products into their places | `nn.branched_block` |
| `bags` | values that are added up where they lie | `nn.attention.Sight` |
| `lstm` | the LSTM with attention, and the convolutions of the 2016 model | `nn.attentive_lstm`, `models.conv_encoder` |
| `steps` | decoding with all of this | `models.*.stepwise` |

Parameters, their names and checkpoints stay.  A fast form asks for device, type and size whenever it is called, and
does as its twin does where it has nothing better, on a GPU always.
"""  # noqa: E501  (a table)

from __future__ import annotations

from torch import nn
from torch.nn.utils import parametrize

from fairseq_plugins.backends.cpu.branches import FastBranchedBlock
from fairseq_plugins.backends.cpu.convolution import FastGatedConvolution, lay_out_
from fairseq_plugins.backends.cpu.linear import FastLinear
from fairseq_plugins.backends.cpu.lstm import FastAttentiveLSTM, FastConvolution
from fairseq_plugins.backends.cpu.steps import (
    FastConvEncoderDecoding,
    FastConvS2SDecoding,
    FastWeightedTransformerDecoding,
)
from fairseq_plugins.models.conv_encoder.convolutional import Convolution
from fairseq_plugins.models.conv_encoder.stepwise import ConvEncoderDecoding
from fairseq_plugins.models.convs2s.stepwise import ConvS2SDecoding
from fairseq_plugins.models.incremental import IncrementalDecoder
from fairseq_plugins.models.weighted_transformer.stepwise import WeightedTransformerDecoding
from fairseq_plugins.nn.attentive_lstm import AttentiveLSTM
from fairseq_plugins.nn.branched_block import BranchedBlock
from fairseq_plugins.nn.gated_convolution import GatedConvolution

__all__ = ["accelerate_"]

_MODULES: dict[type, type] = {
    nn.Linear: FastLinear,
    GatedConvolution: FastGatedConvolution,
    BranchedBlock: FastBranchedBlock,
    AttentiveLSTM: FastAttentiveLSTM,
    Convolution: FastConvolution,
}
_DECODINGS = {
    ConvS2SDecoding: FastConvS2SDecoding,
    WeightedTransformerDecoding: FastWeightedTransformerDecoding,
    ConvEncoderDecoding: FastConvEncoderDecoding,
}


def accelerate_(model: nn.Module) -> None:
    """Exchange a model's modules for their fast forms, once it is built, and again once it will only translate.

    Modules with normalised weights share their class with copies that were made of them, which become fast, too.
    """
    for part in model.modules():
        is_normalised = parametrize.is_parametrized(part)
        if fast := _MODULES.get(parametrize.type_before_parametrizations(part)):
            if is_normalised:
                type(part).__bases__ = (fast,)  # torch has made this class for the module
            else:
                part.__class__ = fast
        if isinstance(part, GatedConvolution) and not is_normalised:
            lay_out_(part)
        if isinstance(part, IncrementalDecoder):
            part.decoding_class = _DECODINGS.get(part.decoding_class, part.decoding_class)
