"""A model that is built for a checkpoint draws no random numbers, and is the checkpoint's afterwards."""

from __future__ import annotations

import re
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY, BaseFairseqModel
from omegaconf import OmegaConf
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import ARCHITECTURES

MODELS = [(each, {}) for each in ARCHITECTURES]
MODELS += [("conv_encoder_tiny", {"encoder_type": each}) for each in ("lstm", "pooling")]


class Draws(TorchDispatchMode):
    """Counts the random numbers that are drawn."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(func) for name in ("normal", "uniform", "rand", "exponential", "bernoulli")):
            self.numbers += args[0].numel()
        return func(*args, **(kwargs or {}))


def build(architecture: str, task: SimpleNamespace, **options: Any) -> BaseFairseqModel:
    args = Namespace(arch=architecture, max_source_positions=64, max_target_positions=64, **options)
    ARCH_CONFIG_REGISTRY[architecture](args)
    return ARCH_MODEL_REGISTRY[architecture].build_model(args, task)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("architecture", "options"), [*MODELS, ("transformer_tiny", {})])
def test_loaded(task: SimpleNamespace, architecture: str, options: dict[str, Any], strict: bool) -> None:
    """fairseq's models, and ours where the checkpoint need not hold everything, start as ever."""
    trained = build(architecture, task, **options)
    state = {"cfg": OmegaConf.create({"model": {"_name": architecture}, "task": {}}), "model": trained.state_dict()}
    loader = SimpleNamespace(build_model=lambda cfg: build(architecture, task, **options))
    with Draws() as draws:
        (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([__file__], None, loader, strict, state=state)
    size = sum(parameter.numel() for parameter in trained.parameters())
    ours = architecture != "transformer_tiny"
    assert (draws.numbers < 0.01 * size) == (ours and strict)
    for (name, actual), expected in zip(model.state_dict().items(), trained.state_dict().values(), strict=True):
        # Of its Transformer's state fairseq 0.12.2 neither reads copies for torch's fused layer nor an empty number.
        if ours or not re.fullmatch(r"encoder\.layers\.\d+\.\w+|.+\._float_tensor", name):
            assert torch.equal(actual, expected), name


def test_afterwards_models_start_as_ever(task: SimpleNamespace) -> None:
    test_loaded(task, "convs2s_tiny", {}, strict=True)
    with Draws() as draws:
        model = build("convs2s_tiny", task)
    assert draws.numbers > sum(parameter.numel() for parameter in model.parameters()) / 2
