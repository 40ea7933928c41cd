"""The registered architectures of the Weighted Transformer, with the sizes of the paper's table 2."""

from __future__ import annotations

from typing import Any

from fairseq_plugins.models.presets import register_presets
from fairseq_plugins.models.weighted_transformer.config import DEFAULTS, WeightedTransformerConfig


def _sizes(layers: int, dim: int, ffn_dim: int, heads: int, dropout: float) -> dict[str, Any]:
    return dict(zip(DEFAULTS, (dropout, dim, ffn_dim, layers, heads), strict=True))


register_presets(
    "weighted_transformer",
    WeightedTransformerConfig,
    {
        "weighted_transformer_small": {},  # A, the defaults
        "weighted_transformer_large": _sizes(6, 1024, 4096, 16, 0.3),  # B
        "weighted_transformer_2layer": _sizes(2, 512, 2048, 8, 0.1),  # C
        "weighted_transformer_4layer": _sizes(4, 512, 2048, 8, 0.1),
        "weighted_transformer_8layer": _sizes(8, 512, 2048, 8, 0.3),
        # Not in the paper: the sizes of fairseq's transformer_iwslt_de_en.
        "weighted_transformer_iwslt_de_en": _sizes(6, 512, 1024, 4, 0.3),
        # Not in the paper: for the quickstart, small enough for minutes on two processor cores.
        "weighted_transformer_tiny": _sizes(2, 128, 512, 4, 0.1),
    },
)
