"""Options of ConvS2S; names follow fairseq's fconv where it has the same option."""

from dataclasses import dataclass, field
from typing import Optional

from fairseq.dataclass import FairseqDataclass
from omegaconf import II

from fairseq_plugins.models.options import Options, fill_in
from fairseq_plugins.ranges import FRACTION, SIZE, check_ranges

__all__ = ["DEFAULTS", "ConvS2SConfig", "complete"]

# Sections 4.2 and 5.1, WMT'16 English-Romanian, the paper's plainest model: holds where an architecture says nothing
# else.
DEFAULTS = {
    "encoder_embed_dim": 512,
    "encoder_layers": "[(512, 3)] * 20",
    "decoder_embed_dim": 512,
    "decoder_layers": "[(512, 3)] * 20",
    "decoder_out_embed_dim": 512,
}


# What is None here an architecture or the model fills in (`models.presets`).
@dataclass
class ConvS2SConfig(FairseqDataclass):
    dropout: float = field(
        default=0.1,
        metadata={"help": "dropout on embeddings, decoder output and the input of each convolution", "range": FRACTION},
    )
    encoder_embed_dim: Optional[int] = field(
        default=None, metadata={"help": "encoder embedding dimension", "range": SIZE}
    )
    encoder_embed_path: Optional[str] = field(
        default=None,
        metadata={"help": "pretrained encoder embeddings: text, after a first line one 'word number ...' a line"},
    )
    encoder_layers: Optional[str] = field(
        default=None,
        metadata={"help": "encoder layers [(width, kernel[, residual]), ...]; residual: layers back, 0 for none"},
    )
    no_encoder_positional_embeddings: bool = field(
        default=False, metadata={"help": "encoder without position embeddings"}
    )
    decoder_embed_dim: Optional[int] = field(
        default=None, metadata={"help": "decoder embedding dimension; must equal the encoder's", "range": SIZE}
    )
    decoder_embed_path: Optional[str] = field(
        default=None,
        metadata={"help": "pretrained decoder embeddings: text, after a first line one 'word number ...' a line"},
    )
    decoder_layers: Optional[str] = field(
        default=None,
        metadata={"help": "decoder layers [(width, kernel[, residual]), ...]; residual: layers back, 0 for none"},
    )
    decoder_attention: str = field(
        default="True", metadata={"help": "which decoder layers attend: True, or a list [True, False, ...]"}
    )
    decoder_out_embed_dim: Optional[int] = field(
        default=None, metadata={"help": "width in front of the projection to the vocabulary", "range": SIZE}
    )
    no_decoder_positional_embeddings: bool = field(
        default=False, metadata={"help": "decoder without position embeddings"}
    )
    share_input_output_embed: bool = field(
        default=False,
        metadata={"help": "tie decoder input and output embeddings, which then must have the same dimension"},
    )
    max_source_positions: int = field(default=II("task.max_source_positions"), metadata={"range": SIZE})
    max_target_positions: int = field(default=II("task.max_target_positions"), metadata={"range": SIZE})


def complete(cfg: Options) -> None:
    """Fill in the sizes that are not set, and refuse those that do not fit together.

    Raises:
        ValueError: names the options and their values.
    """
    fill_in(cfg, DEFAULTS)
    check_ranges(cfg, ConvS2SConfig)
    if cfg.encoder_embed_dim != cfg.decoder_embed_dim:
        # Attention compares the encoder's output with the sum of decoder state and target embedding (equation 1).
        raise ValueError(
            "--encoder-embed-dim and --decoder-embed-dim must be equal, "
            f"but they are {cfg.encoder_embed_dim} and {cfg.decoder_embed_dim}"
        )
    if cfg.share_input_output_embed and cfg.decoder_embed_dim != cfg.decoder_out_embed_dim:
        raise ValueError(
            "--share-input-output-embed needs equal --decoder-embed-dim and --decoder-out-embed-dim, "
            f"but they are {cfg.decoder_embed_dim} and {cfg.decoder_out_embed_dim}"
        )
