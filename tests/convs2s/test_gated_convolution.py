"""A gated convolution of whole sentences, and of windows that were cut out of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fairseq_plugins.convs2s.layers import GatedConvolution


def test_windows_give_what_sentences_give() -> None:
    torch.manual_seed(1)
    convolution = GatedConvolution(3, 2, kernel=4, causal=True)
    convolution.bias.data.normal_()
    x = torch.randn(6, 5, 3)
    windows = F.pad(x, (0, 0, 0, 0, 3, 0)).unfold(0, 4, 1).transpose(2, 3).flatten(2)
    torch.testing.assert_close(convolution.of_windows(windows), convolution(x))
