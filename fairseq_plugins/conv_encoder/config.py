"""Options and architectures of the convolutional encoder model and of its paper's baselines."""

import logging
from dataclasses import dataclass
from typing import Any, Optional

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from omegaconf import II

from fairseq_plugins.common.options import (
    FRACTION,
    MOST_LAYERS,
    POSITIVE,
    SIZE,
    Options,
    Range,
    check_ranges,
    fill_in,
    flag,
    option,
)

logger = logging.getLogger(__name__)

# Defaults, unless an architecture overrides them: IWSLT'14 German-English (section 4.2 and table 1).
DEFAULTS = {
    "dropout": 0.2,
    "encoder_type": "convolutional",
    "encoder_embed_dim": 256,
    "encoder_layers": "[(512, 3)] * 6",
    "aggregation_layers": "[(256, 3)] * 3",
    "encoder_hidden_size": 512,
    "encoder_lstm_layers": 1,
    "decoder_hidden_size": 512,
    "decoder_layers": 1,
    "init_range": 0.05,
}

# This table lists the encoder types that read an option.  With another encoder type, the option causes a warning.
# Options with the default None are not listed, because the architecture may have set their values.
_OF_TYPES = {
    "no_residual": ("convolutional",),
    "single_stack": ("convolutional",),
    "no_encoder_positional_embeddings": ("convolutional", "pooling"),
    "pooling_width": ("pooling",),
    "encoder_lstm_positional_embeddings": ("lstm", "bilstm"),
}


# An option that is None gets its value from the architecture if the architecture sets it (`register_presets`), and
# otherwise from `resolve_config`.
@dataclass
class ConvEncoderConfig(FairseqDataclass):
    dropout: Optional[float] = option(
        None,
        "dropout on embeddings, between LSTM layers, and on the outputs of the decoder and of an LSTM encoder",
        FRACTION,
    )
    encoder_type: Optional[ChoiceEnum(["convolutional", "pooling", "lstm", "bilstm"])] = option(  # type: ignore[valid-type]
        None, "encoder: convolutional (section 3.2), pooling (section 3.1), or a baseline, lstm or bilstm (section 2)"
    )
    encoder_embed_dim: Optional[int] = option(
        None, "width of source and target embeddings, and input width of the output layer", SIZE
    )
    encoder_layers: Optional[str] = option(
        None, "convolutional: layers of CNN-a (keys), [(width, kernel[, residual]), ...]"
    )
    aggregation_layers: Optional[str] = option(
        None,
        "convolutional: layers of CNN-c (values), [(width, kernel[, residual]), ...], or [] to use the "
        "embeddings as values (section 5.3)",
    )
    no_residual: bool = option(
        False, "convolutional: no residual connections (panel b of the paper's figure on encoder depth)"
    )
    single_stack: bool = option(False, "convolutional: use the outputs of CNN-a as values, without CNN-c (section 5.3)")
    no_encoder_positional_embeddings: bool = option(False, "convolutional and pooling encoders: no position embeddings")
    pooling_width: int = option(5, "pooling: k, the number of embeddings that are averaged; must be odd", SIZE)
    encoder_hidden_size: Optional[int] = option(
        None, "lstm and bilstm: units of an LSTM layer, per direction for bilstm", SIZE
    )
    encoder_lstm_layers: Optional[int] = option(None, "lstm and bilstm: number of layers", Range(1, MOST_LAYERS))
    encoder_lstm_positional_embeddings: bool = option(False, "lstm and bilstm: add position embeddings (table 1)")
    decoder_hidden_size: Optional[int] = option(None, "units of a decoder layer", SIZE)
    decoder_layers: Optional[int] = option(
        None, "number of LSTM layers of the decoder; the first layer attends", Range(1, MOST_LAYERS)
    )
    init_range: Optional[float] = option(
        None, "range of initial weights, except in convolutions; narrow layers need a wider range", POSITIVE
    )
    max_source_positions: int = option(II("task.max_source_positions"), allowed=SIZE)
    max_target_positions: int = option(II("task.max_target_positions"), allowed=SIZE)


def resolve_config(cfg: Options) -> None:
    """Fill in unset options, refuse invalid sizes, and warn about options without effect."""
    fill_in(cfg, DEFAULTS)
    check_ranges(cfg, ConvEncoderConfig)
    for name, types in _OF_TYPES.items():
        if cfg.encoder_type not in types and getattr(cfg, name) != getattr(ConvEncoderConfig, name):
            logger.warning(f"{flag(name)} has no effect with --encoder-type {cfg.encoder_type}: remove it")


def _depths(attention: int, aggregation: int) -> dict[str, str]:
    return {"encoder_layers": f"[(512, 3)] * {attention}", "aggregation_layers": f"[(256, 3)] * {aggregation}"}


PRESETS: dict[str, dict[str, Any]] = {
    # Table 1: 6 layers in CNN-a and 3 in CNN-c.  Widths and dropout rate are from sections 4.2 and 4.3.
    "conv_encoder_iwslt_de_en": {},
    # Table 2: the deepest encoder for each language pair, and its decoder.  The dropout rate is from section 4.3.
    "conv_encoder_wmt_en_ro": {**_depths(8, 4), "dropout": 0.1},
    "conv_encoder_wmt_en_de": {**_depths(15, 5), "dropout": 0.1},
    "conv_encoder_wmt_en_fr": {**_depths(20, 5), "dropout": 0.1, "decoder_layers": 2},
    # Table 1, IWSLT'14.
    "conv_encoder_pooling": {"encoder_type": "pooling"},
    # Table 1, IWSLT'14.  On WMT, the paper's BiLSTM has embeddings of 512 dimensions, and two layers for
    # English-French.
    "conv_encoder_bilstm": {"encoder_type": "bilstm"},
    # Not in the paper: a model for the quickstart, which trains in minutes on two cores.  The paper's range of
    # initial weights suits layers with 512 units.  Narrow layers need a wider range, or attention converges to wrong
    # words.
    "conv_encoder_tiny": {
        "dropout": 0.1,
        "encoder_embed_dim": 128,
        "encoder_layers": "[(128, 3)] * 4",
        "aggregation_layers": "[(128, 3)] * 2",
        "decoder_hidden_size": 256,
        "init_range": 0.2,
    },
}
