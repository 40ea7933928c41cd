"""The registered architectures of ConvS2S: sizes from the paper, not from fairseq's presets, which differ.

The paper's embeddings have 512 dimensions everywhere, in front of the output layer too (section 4.2); layers are in
sections 5.1, 5.4 and 5.7.
"""

from __future__ import annotations

from typing import Any

from fairseq_plugins.models.convs2s.config import ConvS2SConfig
from fairseq_plugins.models.presets import register_presets

_WMT_EN_DE = "[(512, 3)] * 10 + [(768, 3)] * 3 + [(2048, 1)] * 2"

# The paper says 15 layers and lists 5 of 512, 4 of 768, 3 of 1024, one of 2048 and one of 4096 units, which are 14.
# The authors' fairseq preset has 6 of 512 and otherwise the same list, so the missing one is taken to be there.
# Against it speaks the paper's context of 25 words, which is that of 12 layers of kernel 3, as listed; 13 have 27.
_WMT_EN_FR = "[(512, 3)] * 6 + [(768, 3)] * 4 + [(1024, 3)] * 3 + [(2048, 1)] + [(4096, 1)]"


def _of_width(width: int, encoder: int, decoder: int) -> dict[str, Any]:
    """So many layers of kernel 3, and embeddings as wide as they."""
    layers = {"encoder_layers": f"[({width}, 3)] * {encoder}", "decoder_layers": f"[({width}, 3)] * {decoder}"}
    return layers | dict.fromkeys(("encoder_embed_dim", "decoder_embed_dim", "decoder_out_embed_dim"), width)


register_presets(
    "convs2s",
    ConvS2SConfig,
    {
        # Section 5.1: 20 layers of 512 units in encoder and decoder, the configuration's own defaults.
        "convs2s_wmt_en_ro": {},
        "convs2s_wmt_en_de": {"encoder_layers": _WMT_EN_DE, "decoder_layers": _WMT_EN_DE},
        "convs2s_wmt_en_fr": {"encoder_layers": _WMT_EN_FR, "decoder_layers": _WMT_EN_FR},
        # Section 5.7: six layers of 256 units each.  The kernel is not stated: taken as 3, like that of all other wide
        # layers of the paper.  Section 4.2 gives all embeddings 512 dimensions: here they are as wide as the layers.
        "convs2s_gigaword": _of_width(256, 6, 6),
        # Sections 5.4 to 5.6: 13 encoder layers with kernel 3, 5 decoder layers with kernel 5.
        "convs2s_analysis": {"encoder_layers": "[(512, 3)] * 13", "decoder_layers": "[(512, 5)] * 5"},
        # Not in the paper: fairseq's IWSLT'14 recipe.
        "convs2s_iwslt_de_en": _of_width(256, 4, 3),
        # Not in the paper: for the quickstart, small enough for minutes on two processor cores.
        "convs2s_tiny": _of_width(128, 3, 3),
    },
)
