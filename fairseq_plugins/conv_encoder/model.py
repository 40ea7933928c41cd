"""A Convolutional Encoder Model for Neural Machine Translation (Gehring et al. 2016, arXiv 1611.02344).

The encoder has one of four types: two stacks of convolutions (section 3.2), average pooling of embeddings
(section 3.1), LSTM layers, or bidirectional LSTM layers (section 2).

B sentences, S source positions, f embedding width, C layer width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from fairseq.models import register_model
from fairseq.tasks import FairseqTask
from torch import Tensor, nn

from fairseq_plugins.common.embedding import InputEmbedding
from fairseq_plugins.common.model import SourceEncoder, TranslationModel
from fairseq_plugins.common.options import ConvolutionSpec, Options, input_widths, parse_convolutions, register_presets
from fairseq_plugins.common.weight_norm import Linear
from fairseq_plugins.conv_encoder.config import PRESETS, ConvEncoderConfig, resolve_config
from fairseq_plugins.conv_encoder.decoder import LSTMDecoder
from fairseq_plugins.cpu.convolution import convolve_channels_first
from fairseq_plugins.cpu.dropout_and_loss import Dropout
from fairseq_plugins.cpu.packing import BatchWeights


class ConvolutionalEncoder(SourceEncoder):
    """An encoder of two convolutional stacks: CNN-a computes the keys of attention, and CNN-c its values.

    Args:
        attention: layers of CNN-a, from the input up.
        aggregation: layers of CNN-c.  If CNN-c has no layers, the values are the embeddings.  If ``aggregation`` is
            None, the values are the outputs of CNN-a.
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

    If layers and embeddings differ in width, linear maps precede and follow the convolutions.  Without layers, the
    stack is the identity.
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
        """Map embeddings to outputs, (B, S, f) -> (B, S, f); the mask, (B, S), is true at padding."""
        padding = padding_mask.unsqueeze(1)
        x = self.from_embedding(e).transpose(1, 2)  # (B, C, S)
        outputs = [x]
        for convolution, shortcut, residual in zip(self.convolutions, self.shortcuts, self.residuals, strict=True):
            # A convolution reads zeros before the first and after the last position of the batch.  Also set padding to
            # zero, so that the outputs of a sentence do not depend on the amount of padding beside it.
            x = convolution(x.masked_fill(padding, 0))
            if residual:
                x = x + shortcut(outputs[-residual])
            x = torch.tanh(x)  # tanh is applied after the residual connection
            outputs.append(x)
        return self.to_embedding(x.transpose(1, 2))


class Convolution(nn.Module):
    """A centred convolution, whose window has one more position on the right if the kernel width is even.

    Section 4.3 divides the gradients of convolutions with d inputs by √d.  Without this division, the layers of a stack
    saturate.  However, optimizers that normalise gradients, such as Adam, would undo the division.  Therefore this
    module stores the convolution's weight and bias multiplied by √d as its parameters.  The backward pass gives these
    parameters the gradients of weight and bias unchanged, without the factor 1/√d of the chain rule.  A step of any
    optimizer then changes weight and bias by 1/√d of the usual amount.  A step of plain SGD has the same effect as a
    step with the paper's divided gradients.

    Gradient clipping limits the norm of the gradients that are not divided by √d.  This norm is 1.15 to 1.4 times as
    large as the norm of the paper's divided gradients (measured with `conv_encoder_tiny` on Multi30k).
    """

    batch_weights: BatchWeights | None = None  # packed weights of the current batch, set by `with_batch_weights`

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
        """Compute all positions, (B, d, S) -> (B, out_dim, S)."""
        if torch.is_grad_enabled():
            weight, bias = (_Scaled.apply(part, self.scale) for part in (self.weight, self.bias))
        else:  # scaling the input is cheaper than scaling the weight
            x, weight, bias = x * self.scale, self.weight, self.bias * self.scale
        return convolve_channels_first(x, weight, bias, self.padding, self.batch_weights)


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
    """An encoder whose keys are averages of ``width`` neighbouring embeddings, and whose values are the embeddings."""

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
    one stack, and backwards in the other.  Dropout is on the input of all layers except the first, and on the encoder's
    output.
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

        Sentences are first shifted so that all padding is on the right.  For layers that read backwards, a gather then
        reverses each sentence.  Packed sequences are not used, because they would need the lengths on the host.
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
    """Return ``x[i, columns[i]]`` for each sentence i, (B, S, width), where ``columns`` has the shape (B, S)."""
    return x.gather(1, columns.unsqueeze(-1).expand_as(x))


@register_model("conv_encoder", dataclass=ConvEncoderConfig)
class ConvEncoderModel(TranslationModel):
    """A convolutional or pooling encoder, or an LSTM baseline, with an LSTM decoder."""

    family = "conv_encoder"
    shortest_warmup = 100
    onnx_program = "fairseq_plugins.conv_encoder.onnx"

    @classmethod
    def build(cls, cfg: Options, task: FairseqTask) -> ConvEncoderModel:
        """Build the model; see `TranslationModel.build`."""
        resolve_config(cfg)
        encoder = _build_encoder(cfg, task.source_dictionary)
        decoder = LSTMDecoder(
            task.target_dictionary,
            _embedding(cfg, task.target_dictionary, cfg.max_target_positions, None),
            hidden_size=cfg.decoder_hidden_size,
            layers=cfg.decoder_layers,
            dropout=cfg.dropout,
        )
        model = cls(encoder, decoder)
        _initialise(model, cfg.init_range)
        return model

    @classmethod
    def training_options(cls, warmup: int) -> str:
        """Return the usual options, and initial weights within ±0.14; with ±0.05, attention is learned late."""
        return f"{super().training_options(warmup)} --init-range 0.14"


def _build_encoder(cfg: Options, dictionary: Dictionary) -> SourceEncoder:
    encoder_type = str(cfg.encoder_type)
    recurrent = encoder_type in ("lstm", "bilstm")
    positional = cfg.encoder_lstm_positional_embeddings if recurrent else not cfg.no_encoder_positional_embeddings
    embedding = _embedding(cfg, dictionary, cfg.max_source_positions, "learned" if positional else None)
    if encoder_type == "pooling":
        return PoolingEncoder(dictionary, embedding, cfg.pooling_width)
    if recurrent:
        return LSTMEncoder(
            dictionary,
            embedding,
            hidden_size=cfg.encoder_hidden_size,
            layers=cfg.encoder_lstm_layers,
            dropout=cfg.dropout,
            bidirectional=encoder_type == "bilstm",
        )

    def stack(layers: str, option: str, may_be_empty: bool = False) -> list[ConvolutionSpec]:
        specs = parse_convolutions(layers, option, may_be_empty)
        return [spec._replace(residual=0) for spec in specs] if cfg.no_residual else specs

    return ConvolutionalEncoder(
        dictionary,
        embedding,
        stack(cfg.encoder_layers, "--encoder-layers"),
        None if cfg.single_stack else stack(cfg.aggregation_layers, "--aggregation-layers", may_be_empty=True),
    )


def _embedding(cfg: Options, dictionary: Dictionary, max_positions: int, positions: str | None) -> InputEmbedding:
    words = nn.Embedding(len(dictionary), cfg.encoder_embed_dim, padding_idx=dictionary.pad())
    return InputEmbedding(words, max_positions, positions, cfg.dropout)


def _initialise(model: nn.Module, init_range: float) -> None:
    """Draw weights uniformly from -init_range to init_range, and set biases to zero (section 4.2).

    Convolutions have their own initialisation.
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if "bias" in name:
                nn.init.zeros_(parameter)
            else:
                nn.init.uniform_(parameter, -init_range, init_range)
        if isinstance(module, nn.Embedding):
            nn.init.zeros_(module.weight[module.padding_idx])
        if isinstance(module, Convolution):
            module.reset_parameters()


register_presets("conv_encoder", ConvEncoderConfig, PRESETS)
