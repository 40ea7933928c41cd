"""ConvS2S (Gehring et al. 2017, sections 3.1 to 3.4): encoder, decoder and model.

B sentences, T target positions, S source positions, C layer width, f embedding width, V vocabulary.

In a decoder layer, attention follows the gate and precedes the residual connection (docs/convs2s.md).  The module
`layers` contains incremental decoding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from fairseq.data import Dictionary
from fairseq.models import register_model
from fairseq.modules import GradMultiply
from fairseq.tasks import FairseqTask
from torch import Tensor, nn

from fairseq_plugins.common.embedding import InputEmbedding, pretrained_embedding
from fairseq_plugins.common.model import IncrementalDecoder, SourceEncoder, TranslationModel
from fairseq_plugins.common.options import (
    ConvolutionSpec,
    Options,
    input_widths,
    parse_attention,
    parse_convolutions,
    register_presets,
)
from fairseq_plugins.common.prefix_tree import PrefixTree
from fairseq_plugins.common.source import Source
from fairseq_plugins.common.weight_norm import Linear, normalised_linear
from fairseq_plugins.convs2s.config import PRESETS, ConvS2SConfig, resolve_config
from fairseq_plugins.convs2s.layers import SQRT_HALF, ConvS2SDecoding, GatedConvolution, MultiStepAttention, Shortcut
from fairseq_plugins.cpu.dropout_and_loss import Dropout


class ConvS2SEncoder(SourceEncoder):
    """An encoder of gated convolutions, with dropout on the input of each convolution.

    Each decoder layer with attention adds to the encoder's gradient, which is divided by twice the number of these
    layers.
    """

    def __init__(
        self,
        dictionary: Dictionary,
        embedding: InputEmbedding,
        convolutions: Sequence[ConvolutionSpec],
        dropout: float,
        attention_layers: int,
    ) -> None:
        super().__init__(dictionary, embedding)
        # Section 3.4 divides the gradient by the number of attention layers.  The authors' code and fairseq divide the
        # gradient by twice this number.
        self.gradient_scale = 1.0 / (2.0 * attention_layers)
        self.dropout = Dropout(dropout, module_name=type(self).__name__)

        retain = 1 - dropout
        embed_dim = embedding.words.embedding_dim
        self.from_embedding = normalised_linear(embed_dim, convolutions[0].width, retain)
        self.convolutions = nn.ModuleList()
        self.shortcuts = nn.ModuleList()
        for (width, kernel, residual), (inputs, start) in zip(convolutions, input_widths(convolutions), strict=True):
            self.convolutions.append(GatedConvolution(inputs, width, kernel, causal=False, retain=retain))
            self.shortcuts.append(Shortcut(residual, start, width))
        self.to_embedding = normalised_linear(width, embed_dim)

    def encode(self, e: Tensor, padding_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys z and values (z + e)√½, each (B, S, f)."""
        padding = padding_mask.t().unsqueeze(-1)  # (S, B, 1)
        z = self.from_embedding(e).transpose(0, 1)  # (S, B, C): time first for the convolutions
        outputs = [z]
        for convolution, shortcut in zip(self.convolutions, self.shortcuts, strict=True):
            # A convolution reads zeros before the first and after the last position of the batch.  Also set padding to
            # zero, so that the outputs of a sentence do not depend on the amount of padding beside it.
            z = convolution(self.dropout(z.masked_fill(padding, 0)))
            z = shortcut(z, outputs)
            outputs.append(z)
        z = self.to_embedding(z).masked_fill(padding, 0).transpose(0, 1).contiguous()  # (B, S, f), read by every layer

        z = GradMultiply.apply(z, self.gradient_scale)
        return z, (z + e) * SQRT_HALF


class ConvS2SDecoder(IncrementalDecoder):
    """A decoder of causal gated convolutions; attention follows each convolution for which ``attends`` is true.

    Dropout is on the input of each convolution, and on the decoder's output.  If the decoder is ``tied``, the output
    projection shares the word embedding's weight.
    """

    decoding_class = ConvS2SDecoding

    def __init__(
        self,
        dictionary: Dictionary,
        embedding: InputEmbedding,
        convolutions: Sequence[ConvolutionSpec],
        attends: Sequence[bool],
        out_embed_dim: int,
        dropout: float,
        tied: bool,
    ) -> None:
        super().__init__(dictionary, embedding)
        self.dropout = Dropout(dropout, module_name=type(self).__name__)

        retain = 1 - dropout
        embed_dim = embedding.words.embedding_dim
        self.from_embedding = normalised_linear(embed_dim, convolutions[0].width, retain)
        self.convolutions = nn.ModuleList()
        self.attentions = nn.ModuleList()
        self.shortcuts = nn.ModuleList()
        widths = input_widths(convolutions)
        for (width, kernel, residual), (inputs, start), attend in zip(convolutions, widths, attends, strict=True):
            self.convolutions.append(GatedConvolution(inputs, width, kernel, causal=True, retain=retain))
            self.attentions.append(MultiStepAttention(width, embed_dim) if attend else None)  # type: ignore[arg-type]
            self.shortcuts.append(Shortcut(residual, start, width))
        self.to_embedding = normalised_linear(width, out_embed_dim)
        self.output_projection: Linear
        if tied:
            self.output_projection = Linear(out_embed_dim, len(dictionary))
            nn.init.zeros_(self.output_projection.bias)
            self.output_projection.weight = embedding.words.weight  # type: ignore[misc]
        else:
            self.output_projection = normalised_linear(out_embed_dim, len(dictionary), retain)

    def features(self, g: Tensor, source: Source) -> tuple[Tensor, Tensor | None]:
        """Return the features, (B, T, out_embed_dim), and the average attention of the layers with attention."""
        h = self.from_embedding(g).transpose(0, 1)  # (T, B, C): time first for the convolutions
        outputs = [h]
        attention = []
        for convolution, attend, shortcut in self.layers:
            h = convolution(self.dropout(h))
            if attend is not None:
                h, a = attend(h.transpose(0, 1), g, source)
                h = h.transpose(0, 1)
                attention.append(a)
            h = shortcut(h, outputs)
            outputs.append(h)
        features = self.dropout(self.to_embedding(h.transpose(0, 1)))
        # The average is over the layers with attention, so that the attention weights of a target word sum to one.
        # fairseq divides the sum of the weights by the number of all layers instead.
        return features, torch.stack(attention).mean(dim=0) if self.wants_attention else None

    def features_of_prefixes(self, tree: PrefixTree, source: Source) -> Tensor:
        """Return the features of all prefixes of a batch, (M, out_embed_dim), in the tree's order."""
        self.embedding.check_length(tree.nodes.size(1))
        g = self.embedding.step(tree.words, tree.positions)
        g_of_sentences = tree.by_sentence(g)
        h = self.from_embedding(g)
        outputs = [h]
        for convolution, attend, shortcut in self.layers:
            h = convolution.of_windows(tree.windows(self.dropout(h), convolution.kernel))
            if attend is not None:
                h = tree.flat(attend(tree.by_sentence(h), g_of_sentences, source)[0])
            h = shortcut(h, outputs)
            outputs.append(h)
        return self.dropout(self.to_embedding(h))

    def attention_modules(self) -> dict[int, nn.Module]:
        """Return the attention modules by layer number; see `IncrementalDecoder.attention_modules`."""
        return {number: module for number, (_, module, _) in enumerate(self.layers, 1) if module is not None}

    @property
    def layers(self) -> Iterator[tuple[GatedConvolution, MultiStepAttention | None, Shortcut]]:
        """Convolution, attention or None, and residual connection of each layer, from the input up."""
        layers: Any = zip(self.convolutions, self.attentions, self.shortcuts, strict=True)
        return layers


@register_model("convs2s", dataclass=ConvS2SConfig)
class ConvS2SModel(TranslationModel):
    """A convolutional encoder and a convolutional decoder with multi-step attention."""

    family = "convs2s"
    warmup_epochs = 0.25
    shortest_warmup = 100
    onnx_program = "fairseq_plugins.convs2s.onnx"
    converters: ClassVar = {"fconv": "fairseq_plugins.convs2s.fconv"}

    @classmethod
    def build(cls, cfg: Options, task: FairseqTask) -> ConvS2SModel:
        """Build the model; see `TranslationModel.build`."""
        resolve_config(cfg)
        encoder_layers = parse_convolutions(cfg.encoder_layers, "--encoder-layers")
        decoder_layers = parse_convolutions(cfg.decoder_layers, "--decoder-layers")
        attends = parse_attention(cfg.decoder_attention, len(decoder_layers))

        def embedding(side: str, dictionary: Dictionary, max_positions: int) -> InputEmbedding:
            dim, path = getattr(cfg, f"{side}_embed_dim"), getattr(cfg, f"{side}_embed_path")
            return InputEmbedding(
                pretrained_embedding(dictionary, dim, path, f"--{side}-embed-path"),
                max_positions=max_positions,
                positions=None if getattr(cfg, f"no_{side}_positional_embeddings") else "learned",
                dropout=cfg.dropout,
            )

        encoder = ConvS2SEncoder(
            task.source_dictionary,
            embedding("encoder", task.source_dictionary, cfg.max_source_positions),
            encoder_layers,
            dropout=cfg.dropout,
            attention_layers=sum(attends),
        )
        decoder = ConvS2SDecoder(
            task.target_dictionary,
            embedding("decoder", task.target_dictionary, cfg.max_target_positions),
            decoder_layers,
            attends,
            out_embed_dim=cfg.decoder_out_embed_dim,
            dropout=cfg.dropout,
            tied=cfg.share_input_output_embed,
        )
        return cls(encoder, decoder)

    @classmethod
    def usual_epochs(cls, pairs: int, dropout: float) -> float:
        """Return the epoch in which the validation loss is usually lowest.

        The formula for this epoch was fitted to trainings of own-data.

        On image captions, the best epochs for 2000, 5000 and 29 000 sentence pairs were 13, 20 and 52 with dropout 0.3,
        and 8, 10 and 17 with dropout 0.2.  On 37 000 pairs of documentation, the best epoch was 28 (dropout 0.2).
        """
        return 13 * (pairs / 2000) ** 0.52 * max(dropout / 0.3, 0) ** 1.8 if pairs < 100_000 else math.inf


register_presets("convs2s", ConvS2SConfig, PRESETS)
