"""An fconv model and a convs2s model with the same weights."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq.models.fconv import FConvModel

from fairseq_plugins.convs2s.fconv import convert_options, convert_parameters
from fairseq_plugins.convs2s.model import ConvS2SModel
from tests.conftest import enliven, random_model

SMALL = {
    "encoder_embed_dim": 12,
    "decoder_embed_dim": 12,
    "decoder_out_embed_dim": 12,
    "encoder_layers": "[(16, 3)] * 2 + [(24, 4)] + [(16, 1, 2)]",
    "decoder_layers": "[(16, 3)] * 2 + [(24, 2)] + [(16, 4, 2)] + [(8, 1, 0)]",
    "decoder_attention": "[True, False, True, True, True]",
}


@pytest.fixture
def pair(task: SimpleNamespace, device: torch.device) -> Callable[..., tuple[FConvModel, ConvS2SModel]]:
    """Return ``pair(option=value, ...)``, which builds both models with the same random weights, in eval mode."""

    def pair(**options: Any) -> tuple[FConvModel, ConvS2SModel]:
        args, theirs = random_model("fconv", task, **{**SMALL, **options})
        enliven(theirs)
        parameters = theirs.state_dict()
        ours = ConvS2SModel.build_model(Namespace(**convert_options(args, parameters)), task)
        ours.load_state_dict(convert_parameters(parameters))
        return theirs.to(device).eval(), ours.to(device).eval()

    return pair
