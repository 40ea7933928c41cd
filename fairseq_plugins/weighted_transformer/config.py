"""Options and architectures of the Weighted Transformer, and options of its optimizer and schedule.

Option names follow fairseq's transformer.  Sizes are those of the paper's table 2.
"""

from dataclasses import dataclass
from typing import Any, Optional

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.optim.adam import FairseqAdamConfig
from omegaconf import II

from fairseq_plugins.common.options import (
    FRACTION,
    MOST_LAYERS,
    NOT_NEGATIVE,
    POSITIVE,
    SIZE,
    Options,
    Range,
    check_ranges,
    fill_in,
    flag,
    option,
)

BRANCH_WEIGHTS = ["learned", "uniform", "random", "resampled"]  # checkpoints store indices into this list

# Defaults, unless an architecture overrides them: the paper's model A (table 2), as large as Transformer base.
DEFAULTS = {
    "dropout": 0.1,
    "encoder_embed_dim": 512,
    "encoder_ffn_embed_dim": 2048,
    "encoder_layers": 6,
    "encoder_attention_heads": 8,
}


# An option that is None gets its value from the architecture if the architecture sets it (`register_presets`), and
# otherwise from `resolve_config`.
@dataclass
class WeightedTransformerConfig(FairseqDataclass):
    dropout: Optional[float] = option(None, "dropout on embeddings and on the output of each block", FRACTION)
    attention_dropout: float = option(0.1, "dropout on the weights of attention", FRACTION)
    relu_dropout: float = option(0.0, "dropout inside the feed-forward networks; the paper has none", FRACTION)
    encoder_embed_dim: Optional[int] = option(
        None, "d_model: width of embeddings and of all layers, also the decoder's", SIZE
    )
    encoder_ffn_embed_dim: Optional[int] = option(None, "d_ff: inner width of the feed-forward networks", SIZE)
    encoder_layers: Optional[int] = option(None, "N: number of encoder layers", Range(1, MOST_LAYERS))
    encoder_attention_heads: Optional[int] = option(None, "h = M: number of heads, and of branches, in a layer", SIZE)
    decoder_ffn_embed_dim: Optional[int] = option(None, "d_ff of the decoder (default: the encoder's)", SIZE)
    decoder_layers: Optional[int] = option(
        None, "number of decoder layers (default: the encoder's)", Range(1, MOST_LAYERS)
    )
    decoder_attention_heads: Optional[int] = option(
        None, "number of heads, and of branches, in a decoder layer (default: the encoder's)", SIZE
    )
    encoder_learned_pos: bool = option(False, "learned instead of sinusoidal position embeddings in the encoder")
    decoder_learned_pos: bool = option(False, "learned instead of sinusoidal position embeddings in the decoder")
    share_embeddings: ChoiceEnum(["all", "decoder", "none"]) = option(  # type: ignore[valid-type]
        "all", "shared embeddings: source, target and output (all), target and output (decoder), or none"
    )
    branch_weights: ChoiceEnum(BRANCH_WEIGHTS) = option(  # type: ignore[valid-type]
        "learned",
        "values of kappa and alpha: learned, or for comparison (table 3) uniform, random, or resampled for each "
        "training batch; --model-overrides can set this option for a trained model",
    )
    branch_constraint: ChoiceEnum(["simplex", "softmax"]) = option(  # type: ignore[valid-type]
        "simplex",
        "how kappa and alpha stay on the simplex: simplex (a projection by --optimizer simplex_adam), or softmax (a "
        "softmax of the trained parameters)",
    )
    branch_gating_topk: Optional[int] = option(
        None, "replace alpha by a gate that selects this many branches for each token (section 4.5)", SIZE
    )
    max_source_positions: int = option(II("task.max_source_positions"), allowed=SIZE)
    max_target_positions: int = option(II("task.max_target_positions"), allowed=SIZE)


def resolve_config(cfg: Options) -> None:
    """Fill in unset sizes, and refuse incompatible sizes."""
    fill_in(cfg, DEFAULTS)
    sizes = ("ffn_embed_dim", "layers", "attention_heads")
    fill_in(cfg, {f"decoder_{size}": getattr(cfg, f"encoder_{size}") for size in sizes})
    check_ranges(cfg, WeightedTransformerConfig)
    if cfg.encoder_embed_dim % 2:
        raise ValueError(f"--encoder-embed-dim must be even, got {cfg.encoder_embed_dim}")
    for side in ("encoder", "decoder"):
        branches = getattr(cfg, f"{side}_attention_heads")
        for name in ("encoder_embed_dim", f"{side}_ffn_embed_dim"):
            size = getattr(cfg, name)
            if size % branches:
                raise ValueError(f"--{side}-attention-heads must divide {flag(name)}, got {branches} and {size}")
        if cfg.branch_gating_topk is not None and cfg.branch_gating_topk > branches:
            raise ValueError(
                f"--branch-gating-topk must be at most --{side}-attention-heads ({branches}), got "
                f"{cfg.branch_gating_topk}"
            )


def _sizes(layers: int, dim: int, ffn_dim: int, heads: int, dropout: float) -> dict[str, Any]:
    return dict(zip(DEFAULTS, (dropout, dim, ffn_dim, layers, heads), strict=True))


PRESETS: dict[str, dict[str, Any]] = {
    # The first three architectures are the paper's models A, B and C (table 2).  Model A has the default sizes.
    "weighted_transformer_small": {},
    "weighted_transformer_large": _sizes(6, 1024, 4096, 16, 0.3),
    "weighted_transformer_2layer": _sizes(2, 512, 2048, 8, 0.1),
    "weighted_transformer_4layer": _sizes(4, 512, 2048, 8, 0.1),
    "weighted_transformer_8layer": _sizes(8, 512, 2048, 8, 0.3),
    # Not in the paper: the sizes of fairseq's transformer_iwslt_de_en.
    "weighted_transformer_iwslt_de_en": _sizes(6, 512, 1024, 4, 0.3),
    # Not in the paper: a model for tens of thousands of sentences (examples/documentation).
    "weighted_transformer_256": _sizes(3, 256, 1024, 4, 0.2),
    # Not in the paper: a model for the quickstart, which trains in minutes on two cores.
    "weighted_transformer_tiny": _sizes(2, 128, 512, 4, 0.1),
}


@dataclass
class SimplexAdamConfig(FairseqAdamConfig):
    adam_betas: Any = option((0.9, 0.98), "betas for Adam optimizer")
    adam_eps: float = option(1e-9, "epsilon for Adam optimizer", POSITIVE)
    weight_decay: float = option(0.0, "weight decay", NOT_NEGATIVE)
    freeze_branch_weights_after: Optional[int] = option(
        None, "freeze kappa and alpha after this number of updates", NOT_NEGATIVE
    )


@dataclass
class WeightedInverseSqrtConfig(FairseqDataclass):
    warmup_updates: int = option(4000, "warm-up updates of the network", SIZE)
    branch_warmup_updates: int = option(400, "warm-up updates of kappa and alpha", SIZE)
    lr_scale: float = option(1.0, "factor of the network's learning rate", NOT_NEGATIVE)
    branch_lr_scale: float = option(1.0, "factor of the learning rate of kappa and alpha", NOT_NEGATIVE)
    encoder_embed_dim: Optional[int] = option(II("model.encoder_embed_dim"), allowed=SIZE)
    # encoder_layers is a number for a Transformer, and a list for a convolutional model.  The schedule refuses a list,
    # because it computes the rate of kappa and alpha from the number of layers.
    encoder_layers: Optional[str] = II("model.encoder_layers")
