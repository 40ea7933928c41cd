"""Small random models of fairseq's own."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY, BaseFairseqModel

from tests.conftest import EOS

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
    "lstm": {"encoder_embed_dim": 12, "encoder_hidden_size": 12, "criterion": "cross_entropy"},
}


def fairseq_model(architecture: str, task: SimpleNamespace, seed: int = 1, **options: Any) -> BaseFairseqModel:
    """In eval mode; its predictions are not uniform, and its sentences end."""
    torch.manual_seed(seed)
    positions = {"max_source_positions": 64, "max_target_positions": 64}
    args = Namespace(arch=architecture, **{**positions, **_SIZES[architecture], **options})
    ARCH_CONFIG_REGISTRY[architecture](args)
    model = ARCH_MODEL_REGISTRY[architecture].build_model(args, task)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed" in name:
                parameter.mul_(5)
            if name.endswith(("fc3.bias", "fc_out.bias")):
                parameter.normal_()
                parameter[EOS] += 1
    return model.eval()
