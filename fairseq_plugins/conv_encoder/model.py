"""A Convolutional Encoder Model for Neural Machine Translation (Gehring et al. 2016, arXiv 1611.02344)."""

from __future__ import annotations

from fairseq.data import Dictionary
from fairseq.models import register_model
from fairseq.tasks import FairseqTask
from torch import nn

from fairseq_plugins.common.embedding import InputEmbedding
from fairseq_plugins.common.layer_list import ConvolutionSpec, parse_convolutions
from fairseq_plugins.common.model import SourceEncoder, TranslationModel
from fairseq_plugins.common.options import Options, register_presets
from fairseq_plugins.conv_encoder.config import PRESETS, ConvEncoderConfig, resolve_config
from fairseq_plugins.conv_encoder.decoder import LSTMDecoder
from fairseq_plugins.conv_encoder.encoders import Convolution, ConvolutionalEncoder, LSTMEncoder, PoolingEncoder


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
