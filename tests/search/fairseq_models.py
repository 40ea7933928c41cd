"""Small random models of fairseq's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from fairseq.models import BaseFairseqModel

from tests.conftest import EOS, random_model

FAIRSEQ_MODELS = ["fconv", "transformer_tiny", "lstm"]
_SIZES: dict[str, dict[str, Any]] = {
    "fconv": {
        "encoder_embed_dim": 12,
        "decoder_embed_dim": 12,
        "decoder_out_embed_dim": 12,
        "encoder_layers": "[(16, 3)] * 2",
        "decoder_layers": "[(16, 3)] * 2",
    },
    "transformer_tiny": {},
    "lstm": {
        "encoder_embed_dim": 12,
        "encoder_hidden_size": 12,
        "decoder_embed_dim": 32,
        "decoder_out_embed_dim": 32,
        "criterion": "cross_entropy",
    },
}


def fairseq_model(architecture: str, task: SimpleNamespace, seed: int = 1, **options: Any) -> BaseFairseqModel:
    """Build a random model in evaluation mode, with nonuniform predictions and with sentences that end."""
    _, model = random_model(architecture, task, seed, **{**_SIZES[architecture], **options})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed" in name:
                parameter.mul_(5)
            elif architecture == "lstm" and "weight" in name:
                parameter.mul_(10)  # otherwise an LSTM repeats a word, and many hypotheses have equal scores
            if name.endswith(("fc3.bias", "fc_out.bias")):
                parameter.normal_()
                parameter[EOS] += 1
    return model.eval()
