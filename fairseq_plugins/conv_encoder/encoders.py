"""Encoders of Gehring et al. 2016: two stacks of convolutions (section 3.2), pooling (3.1), and LSTMs (section 2).

B sentences, S source positions, f embedding width, C layer width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from torch import Tensor, nn

from fairseq_plugins.common.dropout import Dropout
from fairseq_plugins.common.embedding import InputEmbedding
from fairseq_plugins.common.layer_list import ConvolutionSpec, input_widths
from fairseq_plugins.common.linear import Linear
from fairseq_plugins.common.model import SourceEncoder
from fairseq_plugins.cpu.convolution import convolve_channels_first
from fairseq_plugins.cpu.packing import BatchWeights


class ConvolutionalEncoder(SourceEncoder):
    """An encoder of two convolutional stacks: CNN-a computes the keys of attention, and CNN-c its values.

    Args:
        dictionary: source words.
        embedding: computes the embeddings e of words and positions.
        attention: layers of CNN-a, from the input up.
        aggregation: layers of CNN-c.  If empty, values are the embeddings; if None, values are the outputs of CNN-a.
    """

    def __init__(
        self,
        dictionary: Dictionary,
        embedding: InputEmbedding,
        attention: Sequence[ConvolutionSpec],
        aggregation: Sequence[ConvolutionSpec] | None,
    ) -> None:
        super().__init__(dictionary, embedding)
        embed_dim = embedding.words.embedding_dim
        self.cnn_a = ConvolutionStack(embed_dim, attention)
        self.cnn_c = None if aggregation is None else ConvolutionStack(embed_dim, aggregation)

    def encode(self, e: Tensor, padding_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys ``CNN-a(e)`` and values ``CNN-c(e)``, each (B, S, f)."""
        z = self.cnn_a(e, padding_mask)
        return z, z if self.cnn_c is None else self.cnn_c(e, padding_mask)


class ConvolutionStack(nn.Module):
    """A stack of convolutions with residual connections and tanh.

    If layers and embeddings differ in width, linear maps precede and follow the convolutions.

    Args:
        embed_dim: f.
        convolutions: layers from the input up; if empty, the stack is the identity.
    """

    def __init__(self, embed_dim: int, convolutions: Sequence[ConvolutionSpec]) -> None:
        super().__init__()
        width = convolutions[0].width if convolutions else embed_dim
        self.from_embedding = _to_width(embed_dim, width)
        self.convolutions = nn.ModuleList()
        self.shortcuts = nn.ModuleList()
        self.residuals = [layer.residual for layer in convolutions]
        for (width, kernel, residual), (inputs, start) in zip(convolutions, input_widths(convolutions), strict=True):
            self.convolutions.append(Convolution(inputs, width, kernel))
            widens = residual > 0 and start != width
            self.shortcuts.append(nn.Conv1d(start, width, kernel_size=1) if widens else nn.Identity())
        self.to_embedding = _to_width(width, embed_dim)

    def forward(self, e: Tensor, padding_mask: Tensor) -> Tensor:
        """Map embeddings (B, S, f) -> (B, S, f), with a mask that is true at padding, (B, S)."""
        padding = padding_mask.unsqueeze(1)
        x = self.from_embedding(e).transpose(1, 2)  # (B, C, S)
        outputs = [x]
        for convolution, shortcut, residual in zip(self.convolutions, self.shortcuts, self.residuals, strict=True):
            # Padding must be zero, like positions outside the batch, so that results do not depend on padding.
            x = convolution(x.masked_fill(padding, 0))
            if residual:
                x = x + shortcut(outputs[-residual])
            x = torch.tanh(x)  # also applied to the residual connection
            outputs.append(x)
        return self.to_embedding(x.transpose(1, 2))


class Convolution(nn.Module):
    """A centred convolution, whose window has one more position on the right if the kernel is even.

    Section 4.3 divides the gradients of convolutions with d inputs by √d.  Otherwise the layers of a stack saturate.
    However, optimizers that normalise gradients, such as Adam, would undo this division.  Therefore the parameters here
    are √d times weight and bias, while their gradients are those of weight and bias.  A step of any optimizer then
    moves weight and bias 1/√d times as far.  With plain SGD, this is the same as dividing the gradients.

    Gradient clipping reads the undivided gradients.  Their norm is 1.15 to 1.4 times as large as the norm in the paper
    (measured with `conv_encoder_tiny` on Multi30k).

    Args:
        in_dim: input width d.
        out_dim: output width.
        kernel: kernel width k.

    Attributes:
        packing: packed weights of the current batch, set by `with_packing`.
    """

    packing: BatchWeights | None = None

    def __init__(self, in_dim: int, out_dim: int, kernel: int) -> None:
        super().__init__()
        self.padding = ((kernel - 1) // 2, kernel // 2)
        self.scale = in_dim**-0.5
        self.weight = nn.Parameter(torch.empty(out_dim, in_dim, kernel))
        self.bias = nn.Parameter(torch.empty(out_dim))

    def reset_parameters(self) -> None:
        """Draw weight and bias uniformly between -(kd)^-0.5 and (kd)^-0.5 (section 4.2)."""
        bound = 1 / math.sqrt(self.weight[0].numel()) / self.scale
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Compute all positions: (B, d, S) -> (B, out_dim, S)."""
        if torch.is_grad_enabled():
            weight, bias = (_Scaled.apply(part, self.scale) for part in (self.weight, self.bias))
        else:  # scaling the input is cheaper than scaling the weight
            x, weight, bias = x * self.scale, self.weight, self.bias * self.scale
        return convolve_channels_first(x, weight, bias, self.padding, self.packing)


class _Scaled(torch.autograd.Function):
    """The product of a parameter and a scale; the parameter receives the product's gradient, without the scale."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, scale: float) -> Tensor:
        return parameter * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _to_width(from_dim: int, to_dim: int) -> nn.Module:
    return nn.Identity() if from_dim == to_dim else Linear(from_dim, to_dim)


class PoolingEncoder(SourceEncoder):
    """An encoder whose keys are averages of neighbouring embeddings, and whose values are the embeddings.

    Args:
        dictionary: source words.
        embedding: computes the embeddings e of words and positions.
        width: k, the odd number of embeddings in an average.

    Raises:
        ValueError: the width is not a positive odd number.
    """

    def __init__(self, dictionary: Dictionary, embedding: InputEmbedding, width: int) -> None:
        super().__init__(dictionary, embedding)
        if width < 1 or width % 2 == 0:
            raise ValueError(f"--pooling-width must be a positive odd number, got {width}")
        self.width = width

    def encode(self, e: Tensor, padding_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys ``z_j = 1/k Σ_t e_{j+t}`` and values e, each (B, S, f); e is zero outside the sentence."""
        columns = e.masked_fill(padding_mask.unsqueeze(-1), 0).transpose(1, 2)
        z = F.avg_pool1d(columns, self.width, stride=1, padding=self.width // 2)
        return z.transpose(1, 2), e


class LSTMEncoder(SourceEncoder):
    """An encoder of one or two stacks of LSTMs.

    One stack reads forwards.  With two stacks, directions alternate between layers; the first layer reads forwards in
    one stack, and backwards in the other.

    Args:
        dictionary: source words.
        embedding: computes the embeddings e of words.
        hidden_size: units of an LSTM.
        layers: number of LSTMs in each stack.
        dropout: dropout probability on the input of all layers except the first, and on the output.
        bidirectional: whether there are two stacks.
    """

    def __init__(
        self,
        dictionary: Dictionary,
        embedding: InputEmbedding,
        hidden_size: int,
        layers: int,
        dropout: float,
        bidirectional: bool,
    ) -> None:
        super().__init__(dictionary, embedding)
        self.dropout = Dropout(dropout, module_name=type(self).__name__)
        embed_dim = embedding.words.embedding_dim
        sizes = [embed_dim] + [hidden_size] * (layers - 1)
        self.stacks = nn.ModuleList(
            nn.ModuleList(nn.LSTM(size, hidden_size, batch_first=True) for size in sizes)
            for _ in range(2 if bidirectional else 1)
        )
        self.to_embedding = Linear(len(self.stacks) * hidden_size, embed_dim, bias=False)

    def encode(self, e: Tensor, padding_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the projected top states of all stacks as keys and as values, (B, S, f).

        Sentences are first shifted so that all padding is on the right.  They can then be reversed by indices, without
        packed sequences, which would need the lengths on the host.
        """
        tokens = padding_mask.logical_not().to(torch.long)
        first = tokens.argmax(dim=1, keepdim=True)  # column of the first token
        last = tokens.sum(dim=1, keepdim=True) - 1
        column = torch.arange(tokens.size(1), device=tokens.device)
        reverse = (last - column) % tokens.size(1)

        forward = _take(e, (first + column) % tokens.size(1))
        tops = []
        for start, stack in enumerate(self.stacks):
            x, reversed_ = forward, False
            for number, lstm in enumerate(stack.children()):
                x = self.dropout(x) if number > 0 else x
                backwards = len(self.stacks) == 2 and (start + number) % 2 == 1
                x = lstm(_take(x, reverse) if backwards != reversed_ else x)[0]
                reversed_ = backwards
            tops.append(_take(x, reverse) if reversed_ else x)
        z = self.dropout(self.to_embedding(torch.cat(tops, dim=-1)))
        z = _take(z, (column - first) % tokens.size(1))
        return z, z


def _take(x: Tensor, columns: Tensor) -> Tensor:
    """Return ``x[i, columns[i]]`` for each sentence i, (B, S, width); columns: (B, S)."""
    return x.gather(1, columns.unsqueeze(-1).expand_as(x))
