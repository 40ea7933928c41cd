"""The layers of the Weighted Transformer (Ahmed et al. 2017, section 3, figure 1).

Where the branches are is a decision that the paper leaves open.  Here, in the encoder self-attention and feed-forward
network are one branched block; in the decoder self-attention is the Transformer's own, and the attention to the source
and the feed-forward network are one branched block.  A 6+6-layer model of 8 heads then has 192 weights κ and α, the
number that the paper names.

B sentences, T target positions, S source positions, d model width.
"""

from __future__ import annotations

from fairseq.modules import FairseqDropout
from torch import Tensor, nn

from fairseq_plugins.models.options import Options
from fairseq_plugins.nn.attention import AttentionHeads
from fairseq_plugins.nn.branched_block import BranchedBlock
from fairseq_plugins.nn.initialisation import xavier_
from fairseq_plugins.nn.source import Source

__all__ = ["DecoderLayer", "EncoderLayer"]


class EncoderLayer(nn.Module):
    """Self-attention into a branched block.

    Args:
        cfg: the model's options, complete.
    """

    def __init__(self, cfg: Options) -> None:
        super().__init__()
        self.attention = AttentionHeads(cfg.encoder_embed_dim, cfg.encoder_attention_heads, cfg.attention_dropout)
        self.branches = _branches(cfg, "encoder", type(self).__name__)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """One layer.

        Args:
            x: (B, S, d).
            bias: added to the scores of attention, minus infinity at padding, (B, 1, 1, S).

        Returns:
            (B, S, d).
        """
        return self.branches(x, self.attention(x, x, bias))


class DecoderLayer(nn.Module):
    """Causal self-attention as in the Transformer, then attention to the source into a branched block.

    Args:
        cfg: the model's options, complete.
    """

    def __init__(self, cfg: Options) -> None:
        super().__init__()
        dim, heads = cfg.encoder_embed_dim, cfg.decoder_attention_heads
        self.self_attention = AttentionHeads(dim, heads, cfg.attention_dropout)
        self.self_attention_out = xavier_(nn.Linear(dim, dim))
        self.self_attention_norm = nn.LayerNorm(dim)
        self.source_attention = AttentionHeads(dim, heads, cfg.attention_dropout)
        self.branches = _branches(cfg, "decoder", type(self).__name__)
        self.dropout = FairseqDropout(cfg.dropout, module_name=type(self).__name__)

    def forward(self, x: Tensor, source: Source, seen: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """One layer.

        Args:
            x: (B, T, d).
            source: the encoder's output, (B, S, d).
            seen: added to the scores of self-attention, (B, 1, T, T); None where a position sees those up to itself.

        Returns:
            the layer's output, and what attends to the source, for its weights to be computed from, both (B, T, d).
        """
        out = self.self_attention_out(self.self_attention(x, x, seen, causal=seen is None))
        x = self.self_attention_norm(x + self.dropout(out))
        heads = self.source_attention(x, source.values, source.bias.unsqueeze(1))
        return self.branches(x, heads), x


def _branches(cfg: Options, side: str, owner: str) -> BranchedBlock:
    return BranchedBlock(
        cfg.encoder_embed_dim,
        getattr(cfg, f"{side}_ffn_embed_dim"),
        getattr(cfg, f"{side}_attention_heads"),
        mode=str(cfg.branch_weights),
        constraint=str(cfg.branch_constraint),
        gating_topk=cfg.branch_gating_topk,
        dropout=cfg.dropout,
        relu_dropout=cfg.relu_dropout,
        owner=owner,
    )
