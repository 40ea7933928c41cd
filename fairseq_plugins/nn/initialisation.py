"""Linear maps and embeddings, initialised as ConvS2S section 3.5 and appendix A derive it.

The aim is to keep the variance of activations and gradients from layer to layer.  Dropout with retain probability p
multiplies the variance of its output by 1/p, so a weight behind dropout is drawn smaller by √p; a gated linear unit
divides the variance by four for small inputs, so the weight in front of one is drawn larger by √4
(`nn.gated_convolution`).
"""

from __future__ import annotations

import math

from torch import nn

from fairseq_plugins.nn.weight_norm import weight_norm

__all__ = ["Embedding", "Linear"]


def Embedding(num_embeddings: int, embedding_dim: int, padding_idx: int) -> nn.Embedding:
    """Embeddings from N(0, 0.1) (section 3.5), zero for the padding symbol."""
    embedding = nn.Embedding(num_embeddings, embedding_dim, padding_idx=padding_idx)
    nn.init.normal_(embedding.weight, mean=0, std=0.1)
    nn.init.zeros_(embedding.weight[padding_idx])
    return embedding


def Linear(in_features: int, out_features: int, retain: float = 1.0) -> nn.Linear:
    """A weight-normalised linear map with weights from N(0, √(p/n)) and zero bias.

    Args:
        in_features: n, the input connections of each output.
        out_features: number of outputs.
        retain: p, the probability with which dropout retains each input.
    """
    linear = nn.Linear(in_features, out_features)
    nn.init.normal_(linear.weight, mean=0, std=math.sqrt(retain / in_features))
    nn.init.zeros_(linear.bias)
    return weight_norm(linear, dim=0)
