"""The registered architectures of the convolutional encoder and of what the paper compares it with."""

from __future__ import annotations

from fairseq_plugins.models.conv_encoder.config import ConvEncoderConfig
from fairseq_plugins.models.presets import register_presets


def _depths(attention: int, aggregation: int) -> dict[str, str]:
    return {"encoder_layers": f"[(512, 3)] * {attention}", "aggregation_layers": f"[(256, 3)] * {aggregation}"}


register_presets(
    "conv_encoder",
    ConvEncoderConfig,
    {
        # Table 1: 6 layers in CNN-a and 3 in CNN-c; widths and dropout from sections 4.2 and 4.3: the model's defaults.
        "conv_encoder_iwslt_de_en": {},
        # Table 2, the deepest encoder for each language pair with its decoder; dropout of section 4.3.
        "conv_encoder_wmt_en_ro": {**_depths(8, 4), "dropout": 0.1},
        "conv_encoder_wmt_en_de": {**_depths(15, 5), "dropout": 0.1},
        "conv_encoder_wmt_en_fr": {**_depths(20, 5), "dropout": 0.1, "decoder_layers": 2},
        # Table 1, IWSLT'14.
        "conv_encoder_pooling": {"encoder_type": "pooling"},
        # Table 1, IWSLT'14.  For WMT the paper takes embeddings of 512, and two layers for English-French.
        "conv_encoder_bilstm": {"encoder_type": "bilstm"},
        # Not in the paper: for the quickstart, small enough for minutes on two processor cores.  Within the paper's
        # range, which suits layers of 512, such narrow ones pass on so little that attention settles on wrong words.
        "conv_encoder_tiny": {
            "dropout": 0.1,
            "encoder_embed_dim": 128,
            "encoder_layers": "[(128, 3)] * 4",
            "aggregation_layers": "[(128, 3)] * 2",
            "decoder_hidden_size": 256,
            "init_range": 0.2,
        },
    },
)
