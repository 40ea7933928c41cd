"""Options of the convolutional encoder with an LSTM decoder."""

import logging
from dataclasses import dataclass, field
from typing import Optional

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from omegaconf import II

from fairseq_plugins.models.options import Options, fill_in
from fairseq_plugins.nn.layer_list import MOST_LAYERS
from fairseq_plugins.ranges import FRACTION, POSITIVE, SIZE, Range, check_ranges

__all__ = ["ConvEncoderConfig", "complete"]

logger = logging.getLogger(__name__)

# Section 4.2 and table 1, for IWSLT'14 German-English: holds where an architecture says nothing else.
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

# Options, and the types of encoder that they are for; not sizes, which one may give for all types.
_OF_TYPES = {
    "no_residual": ("convolutional",),
    "single_stack": ("convolutional",),
    "no_encoder_positional_embeddings": ("convolutional", "pooling"),
    "pooling_width": ("pooling",),
    "encoder_lstm_positional_embeddings": ("lstm", "bilstm"),
}


# What is None here an architecture or the model fills in (`models.presets`).
@dataclass
class ConvEncoderConfig(FairseqDataclass):
    dropout: Optional[float] = field(
        default=None,
        metadata={"help": "dropout on embeddings, decoder output and between LSTM layers", "range": FRACTION},
    )
    encoder_type: Optional[ChoiceEnum(["convolutional", "pooling", "lstm", "bilstm"])] = field(  # type: ignore[valid-type]
        default=None, metadata={"help": "the encoder: section 3.2, section 3.1, or the baselines of section 2"}
    )
    encoder_embed_dim: Optional[int] = field(
        default=None,
        metadata={"help": "width of source and target embeddings, and in front of the output layer", "range": SIZE},
    )
    encoder_layers: Optional[str] = field(
        default=None,
        metadata={"help": "convolutional: CNN-a, for attention scores, [(width, kernel[, residual]), ...]"},
    )
    aggregation_layers: Optional[str] = field(
        default=None,
        metadata={
            "help": "convolutional: CNN-c, for what is averaged: [(width, kernel[, residual]), ...], or [] for the "
            "embeddings (section 5.3)"
        },
    )
    no_residual: bool = field(
        default=False, metadata={"help": "convolutional: no residual connections (paper's figure of encoder depth, b)"}
    )
    single_stack: bool = field(
        default=False, metadata={"help": "convolutional: average the outputs of CNN-a, without a CNN-c (section 5.3)"}
    )
    no_encoder_positional_embeddings: bool = field(
        default=False, metadata={"help": "convolutional and pooling: no position embeddings"}
    )
    pooling_width: int = field(default=5, metadata={"help": "pooling: k, words of an average; odd", "range": SIZE})
    encoder_hidden_size: Optional[int] = field(
        default=None, metadata={"help": "lstm and bilstm: units of an LSTM, of bilstm in each direction", "range": SIZE}
    )
    encoder_lstm_layers: Optional[int] = field(
        default=None, metadata={"help": "lstm and bilstm: number of layers", "range": Range(1, MOST_LAYERS)}
    )
    encoder_lstm_positional_embeddings: bool = field(
        default=False, metadata={"help": "lstm and bilstm: position embeddings too (table 1)"}
    )
    decoder_hidden_size: Optional[int] = field(
        default=None, metadata={"help": "units of a decoder layer", "range": SIZE}
    )
    decoder_layers: Optional[int] = field(
        default=None,
        metadata={
            "help": "number of LSTM layers of the decoder, of which the first attends",
            "range": Range(1, MOST_LAYERS),
        },
    )
    init_range: Optional[float] = field(
        default=None,
        metadata={
            "help": "weights but those of convolutions start within this range; narrow layers need a wider one",
            "range": POSITIVE,
        },
    )
    max_source_positions: int = field(default=II("task.max_source_positions"), metadata={"range": SIZE})
    max_target_positions: int = field(default=II("task.max_target_positions"), metadata={"range": SIZE})


def complete(cfg: Options) -> None:
    """Fill in what is not set, refuse sizes that cannot be, and warn of options that do nothing.

    Raises:
        ValueError: names the option and its value.
    """
    fill_in(cfg, DEFAULTS)
    check_ranges(cfg, ConvEncoderConfig)
    for option, types in _OF_TYPES.items():
        if cfg.encoder_type not in types and getattr(cfg, option) != getattr(ConvEncoderConfig, option):
            logger.warning(f"--{option.replace('_', '-')} does nothing with --encoder-type {cfg.encoder_type}")
