"""Shared fixtures: the device, a dictionary, and small models."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY, BaseFairseqModel

import fairseq_plugins
from tests.commands import make_data
from tests.repairs.payloads import untrained

fairseq_plugins.install()

# The smallest architecture of each family.
SMALLEST = ["convs2s_tiny", "weighted_transformer_tiny", "conv_encoder_tiny"]
ARCHITECTURES = [name for name in SMALLEST if name in ARCH_MODEL_REGISTRY]
WORDS = 40
EOS = 2


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where the tests of models run: cpu or cuda")


def pytest_configure() -> None:
    torch.backends.cudnn.allow_tf32 = False  # TF32 would reduce products to ten bits of precision


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest tests first, so that no worker runs them alone at the end."""
    items.sort(key=lambda item: item.path.name != "test_pages.py")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    device = torch.device(request.config.getoption("--device"))
    if device.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    return device


@pytest.fixture
def _without_cudnn() -> Iterator[None]:
    """Switch cuDNN off: cuDNN has no gradient of an LSTM in eval mode."""
    with torch.backends.cudnn.flags(enabled=False):
        yield


@pytest.fixture(params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a small corpus in fairseq's binary form."""
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def state(data: Path) -> dict[str, Any]:
    """Return a checkpoint of an untrained model of fairseq."""
    return untrained(data)


@pytest.fixture(scope="session")
def dictionary() -> Dictionary:
    dictionary = Dictionary()
    for index in range(WORDS):
        dictionary.add_symbol(f"w{index}")
    return dictionary


@pytest.fixture(scope="session")
def task(dictionary: Dictionary) -> SimpleNamespace:
    """Return the parts of a translation task that building a model needs."""
    return SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)


@pytest.fixture
def build(task: SimpleNamespace, device: torch.device) -> Callable[..., BaseFairseqModel]:
    """Return ``build(architecture, seed=1, option=value, ...)``, which builds a random model in eval mode.

    Layers differ more in an `enliven`ed model, which amplifies rounding errors if it has many layers.
    """

    def build(architecture: str, seed: int = 1, enlivened: bool = True, **options: Any) -> BaseFairseqModel:
        _, model = random_model(architecture, task, seed, **options)
        if enlivened:
            enliven(model)
        return model.to(device).eval()

    return build


def random_model(architecture: str, task: Any, /, seed: int = 1, **options: Any) -> tuple[Namespace, BaseFairseqModel]:
    """Return an untrained model of an architecture, the plugin's or fairseq's, and all its options."""
    torch.manual_seed(seed)
    args = Namespace(**{"arch": architecture, "max_source_positions": 64, "max_target_positions": 64, **options})
    ARCH_CONFIG_REGISTRY[architecture](args)
    return args, ARCH_MODEL_REGISTRY[architecture].build_model(args, task)


def enliven(model: torch.nn.Module) -> None:
    """Change an untrained model so that all parts matter, with nonzero biases, nonuniform attention and predictions."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
                if "output_projection" in name or "fc3" in name:
                    parameter[EOS] += 2  # sentences end at different steps
            elif (
                "embed" in name and parameter.dim() > 1 and "to_embedding" not in name and "from_embedding" not in name
            ):
                parameter.mul_(5)
            elif hasattr(model.decoder, "attentive"):
                parameter.mul_(1.5)
        output = getattr(model.decoder, "output_projection", None)
        if output is not None and output.bias is None:
            # In a Transformer, the last normalisation prefers the end of the sentence instead.
            end = output.weight[EOS]
            model.decoder.layers[-1].branches.norm.bias.add_(25 * end / end.square().sum())


@pytest.fixture
def sentences(dictionary: Dictionary, device: torch.device) -> Callable[..., torch.Tensor]:
    """Return ``sentences(lengths, left_pad=False)``, which draws sentences of these lengths, with ends and padding."""

    def sentences(lengths: list[int], left_pad: bool = False, seed: int = 1) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        batch = torch.full((len(lengths), max(lengths)), dictionary.pad())
        for row, length in zip(batch, lengths, strict=True):
            words = torch.randint(dictionary.nspecial, len(dictionary), (length,), generator=generator)
            words[-1] = dictionary.eos()
            row[-length:] = words
            if not left_pad:
                row.copy_(row.roll(length - max(lengths)))
        return batch.to(device)

    return sentences
