"""Options of the Weighted Transformer; names follow fairseq's transformer where it has the same option."""

from dataclasses import dataclass, field
from typing import Optional

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from omegaconf import II

from fairseq_plugins.models.options import Options, fill_in
from fairseq_plugins.nn.layer_list import MOST_LAYERS
from fairseq_plugins.ranges import FRACTION, SIZE, Range, check_ranges

__all__ = ["BRANCH_WEIGHTS", "DEFAULTS", "WeightedTransformerConfig", "complete"]

BRANCH_WEIGHTS = ["learned", "uniform", "random", "resampled"]  # checkpoints hold places in this list

# The paper's model A (table 2), as large as the Transformer's base model.
DEFAULTS = {
    "dropout": 0.1,
    "encoder_embed_dim": 512,
    "encoder_ffn_embed_dim": 2048,
    "encoder_layers": 6,
    "encoder_attention_heads": 8,
}


# What is None here an architecture or the model fills in (`models.presets`).
@dataclass
class WeightedTransformerConfig(FairseqDataclass):
    dropout: Optional[float] = field(
        default=None, metadata={"help": "dropout on embeddings and on the output of each block", "range": FRACTION}
    )
    attention_dropout: float = field(
        default=0.1, metadata={"help": "dropout on the weights of attention", "range": FRACTION}
    )
    relu_dropout: float = field(
        default=0.0,
        metadata={"help": "dropout inside the feed-forward networks; the paper has none", "range": FRACTION},
    )
    encoder_embed_dim: Optional[int] = field(
        default=None,
        metadata={"help": "d_model: width of embeddings and of all layers, also the decoder's", "range": SIZE},
    )
    encoder_ffn_embed_dim: Optional[int] = field(
        default=None, metadata={"help": "d_ff: inner width of the feed-forward networks", "range": SIZE}
    )
    encoder_layers: Optional[int] = field(
        default=None, metadata={"help": "N: number of encoder layers", "range": Range(1, MOST_LAYERS)}
    )
    encoder_attention_heads: Optional[int] = field(
        default=None, metadata={"help": "h = M: heads, and branches, of a layer", "range": SIZE}
    )
    decoder_ffn_embed_dim: Optional[int] = field(
        default=None, metadata={"help": "d_ff of the decoder (default: same)", "range": SIZE}
    )
    decoder_layers: Optional[int] = field(
        default=None, metadata={"help": "number of decoder layers (default: same)", "range": Range(1, MOST_LAYERS)}
    )
    decoder_attention_heads: Optional[int] = field(
        default=None, metadata={"help": "heads, and branches, of a decoder layer (default: same)", "range": SIZE}
    )
    encoder_learned_pos: bool = field(
        default=False, metadata={"help": "learned, not sinusoidal, positions in the encoder"}
    )
    decoder_learned_pos: bool = field(
        default=False, metadata={"help": "learned, not sinusoidal, positions in the decoder"}
    )
    share_embeddings: ChoiceEnum(["all", "decoder", "none"]) = field(  # type: ignore[valid-type]
        default="all",
        metadata={"help": "which embeddings are one: source, target and output (all), the latter two (decoder), none"},
    )
    branch_weights: ChoiceEnum(BRANCH_WEIGHTS) = field(  # type: ignore[valid-type]
        default="learned",
        metadata={
            "help": "kappa and alpha: learned, or for comparison (paper's Table 3, also for a trained model, with "
            "--model-overrides) uniform, random, or random ones drawn anew for each batch of training"
        },
    )
    branch_constraint: ChoiceEnum(["simplex", "softmax"]) = field(  # type: ignore[valid-type]
        default="simplex",
        metadata={"help": "how kappa and alpha sum to one: projected by --optimizer simplex_adam, or a softmax"},
    )
    branch_gating_topk: Optional[int] = field(
        default=None,
        metadata={
            "help": "in place of alpha, a gate that picks so many branches for each token (section 4.5)",
            "range": SIZE,
        },
    )
    max_source_positions: int = field(default=II("task.max_source_positions"), metadata={"range": SIZE})
    max_target_positions: int = field(default=II("task.max_target_positions"), metadata={"range": SIZE})


def complete(cfg: Options) -> None:
    """Fill in the sizes that are not set, and refuse those that do not fit together.

    Raises:
        ValueError: names the options and their values.
    """
    fill_in(cfg, DEFAULTS)
    sizes = ("ffn_embed_dim", "layers", "attention_heads")
    fill_in(cfg, {f"decoder_{size}": getattr(cfg, f"encoder_{size}") for size in sizes})
    check_ranges(cfg, WeightedTransformerConfig)
    if cfg.encoder_embed_dim % 2:
        raise ValueError(f"--encoder-embed-dim must be even, but it is {cfg.encoder_embed_dim}")
    for side in ("encoder", "decoder"):
        branches = getattr(cfg, f"{side}_attention_heads")
        for name in ("encoder_embed_dim", f"{side}_ffn_embed_dim"):
            size = getattr(cfg, name)
            if size % branches:
                raise ValueError(
                    f"--{side}-attention-heads must divide --{name.replace('_', '-')}, but {branches} does not "
                    f"divide {size}"
                )
        if cfg.branch_gating_topk is not None and cfg.branch_gating_topk > branches:
            raise ValueError(
                f"--branch-gating-topk must be at most --{side}-attention-heads ({branches}), got "
                f"{cfg.branch_gating_topk}"
            )
