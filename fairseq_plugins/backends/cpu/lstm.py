"""The 2016 model's parts on a processor."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_plugins.backends.cpu.linear import linear
from fairseq_plugins.backends.cpu.packing import map_of
from fairseq_plugins.models.conv_encoder.convolutional import Convolution
from fairseq_plugins.nn.attentive_lstm import AttentiveLSTM

__all__ = ["FastAttentiveLSTM", "FastConvolution"]


class FastAttentiveLSTM(AttentiveLSTM):
    """The same, with weights laid out once for all steps."""

    def map_of(self, weight: Tensor, rows: int) -> Callable[[Tensor], Tensor]:
        """As `AttentiveLSTM.map_of`."""
        return map_of(weight, None, rows)


class FastConvolution(Convolution):
    """The same; without gradients, a product of windows."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, d, S) -> (B, out_dim, S)."""
        if torch.is_grad_enabled() or x.device.type != "cpu":
            return super().forward(x)
        # A sentence is smaller than the weight.
        windows = F.pad(x * self.scale, self.padding).unfold(2, self.weight.size(2), 1).transpose(1, 2)
        return linear(windows.flatten(2), self.weight.flatten(1), self.bias * self.scale).transpose(1, 2)
