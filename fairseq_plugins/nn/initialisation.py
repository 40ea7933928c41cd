"""First values of linear maps and embeddings.

ConvS2S derives its own in section 3.5 and appendix A, to keep the variance of activations and gradients from layer to
layer.  Dropout with retain probability p multiplies the variance of its output by 1/p, so a weight behind dropout is
drawn smaller by √p; a gated linear unit divides the variance by four for small inputs, so the weight in front of one is
drawn larger by √4 (`nn.gated_convolution`).
"""

from __future__ import annotations

import math

from torch import nn

from fairseq_plugins.nn.weight_norm import weight_norm

__all__ = ["normal_embedding", "with_weight_norm", "xavier_"]


def normal_embedding(num_embeddings: int, embedding_dim: int, padding_idx: int, std: float = 0.1) -> nn.Embedding:
    """Embeddings from N(0, std), ConvS2S's by default, zero for the padding symbol."""
    embedding = nn.Embedding(num_embeddings, embedding_dim, padding_idx=padding_idx)
    nn.init.normal_(embedding.weight, mean=0, std=std)
    nn.init.zeros_(embedding.weight[padding_idx])
    return embedding


def with_weight_norm(linear: nn.Linear, retain: float = 1.0) -> nn.Linear:
    """The map of n inputs with a normalised weight, which is from N(0, √(p/n)), and zero bias, as all of ConvS2S's.

    Args:
        linear: a new map.
        retain: p, the probability with which dropout retains each input.
    """
    nn.init.normal_(linear.weight, mean=0, std=math.sqrt(retain / linear.in_features))
    nn.init.zeros_(linear.bias)
    return weight_norm(linear, dim=0)


def xavier_(linear: nn.Linear, gain: float = 1.0) -> nn.Linear:
    """The map with Xavier's uniform weight and zero bias, as fairseq's Transformer has them."""
    nn.init.xavier_uniform_(linear.weight, gain=gain)
    nn.init.zeros_(linear.bias)
    return linear
