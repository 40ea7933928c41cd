"""Old and new checkpoints of fairseq's fconv have the same translations after conversion as in fairseq."""

from __future__ import annotations

import re
import shlex
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.models.fconv import FConvModel

from fairseq_plugins.convs2s.fconv import convert_parameters
from tests.cli.conftest import refused, tool
from tests.common.test_generation import assert_same, generate
from tests.conftest import enliven, random_model

OPTIONS = {
    "encoder_layers": "[(16, 3)] * 2 + [(24, 3)]",
    "decoder_layers": "[(16, 3)] * 2 + [(24, 3)]",
    "encoder_embed_dim": 12,
    "decoder_embed_dim": 12,
    "decoder_out_embed_dim": 12,
    "max_source_positions": 64,
    "max_target_positions": 64,
}


@pytest.fixture
def fconv(task) -> FConvModel:
    _, model = random_model("fconv", task, **OPTIONS)
    enliven(model)
    for name, parameter in model.named_parameters():
        if name.endswith("weight_g"):
            parameter.data.mul_(torch.rand_like(parameter) + 0.5)  # differs from the norm of weight_v
    return model.eval()


def save(path: Path, model: dict[str, torch.Tensor], data: Path, **options: Any) -> Path:
    """Save a checkpoint in fairseq's format of 2017, with an ``args`` namespace and few other entries."""
    args = Namespace(data=str(data), source_lang="src", target_lang="tgt", **{"arch": "fconv", **OPTIONS, **options})
    history = [{"criterion_name": "CrossEntropyCriterion", "best_loss": 4.0, "optimizer": {}}]
    extra = {"epoch": 3, "batch_offset": 0, "val_loss": 4.0}
    torch.save({"args": args, "model": model, "optimizer_history": history, "extra_state": extra}, path)
    return path


def first_version(parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the same weights with one magnitude per kernel position in the decoder, and stale linearised weights."""
    old = {name: value.clone() for name, value in parameters.items() if name != "decoder.version"}
    for name in [name for name in old if re.fullmatch(r"decoder\.convolutions\.\d+\.weight_v", name)]:
        prefix = name.removesuffix("weight_v")
        weight = torch._weight_norm(old[name], old[prefix + "weight_g"], 2)
        old[prefix + "weight_g"] = torch.linalg.vector_norm(weight, dim=(1, 2), keepdim=True)
        old[prefix + "weight_v"] = weight * (torch.rand(weight.size(0), 1, 1) + 0.5)
        old[prefix + "_linearized_weight"] = torch.full((weight.size(2), weight[..., 0].numel()), float("nan"))
    return old


@pytest.fixture
def data(tmp_path: Path, dictionary) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    for language in ("src", "tgt"):
        dictionary.save(str(folder / f"dict.{language}.txt"))
    return folder


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("prepared", [False, True])
@torch.no_grad()
def test_translates_as_fairseq_does(tmp_path, data, dictionary, sentences, fconv, version: int, prepared: bool) -> None:
    parameters = fconv.state_dict()
    old = save(tmp_path / "old.pt", first_version(parameters) if version == 1 else parameters, data)
    tool("import-fconv", old, tmp_path / "new.pt")
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(tmp_path / "new.pt")])
    assert type(model).__name__ == "ConvS2SModel"
    assert model.max_positions() == (62, 62)
    if prepared:
        model.make_generation_fast_(beamable_mm_beam_size=5, need_attn=True)
    source = sentences([9, 3, 6, 1]).cpu()
    assert_same(generate([model], dictionary, source), generate([fconv], dictionary, source))


@torch.no_grad()
def test_missing_options_get_the_defaults_of_fairseq(tmp_path, data, task, capsys) -> None:
    """Options that an old checkpoint lacks get the defaults of its architecture."""
    parameters = random_model("fconv_iwslt_de_en", task)[1].state_dict()
    old = Namespace(arch="fconv_iwslt_de_en", data=str(data), source_lang="src", target_lang="tgt", max_positions=64)
    state = {"args": old, "model": parameters, "optimizer_history": [{"criterion_name": "x", "best_loss": 4.0}]}
    torch.save({**state, "extra_state": {"epoch": 1}}, tmp_path / "old.pt")
    new = str(tmp_path / "a new.pt")
    tool("import-fconv", tmp_path / "old.pt", new)
    assert shlex.split(capsys.readouterr().out)[-2:] == ["--path", new]
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([new])
    assert [convolution.kernel for convolution in model.decoder.convolutions] == [3, 3, 3]


def test_refuses_checkpoints_that_it_cannot_convert(tmp_path, data, fconv) -> None:
    parameters = fconv.state_dict()
    checkpoint, new = save(tmp_path / "old.pt", parameters, data), tmp_path / "new.pt"
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "text.pt").write_text("not a checkpoint")
    other = save(tmp_path / "other.pt", parameters, data, arch="transformer")
    ours = save(tmp_path / "ours.pt", parameters, data, arch="convs2s_tiny")
    more = save(tmp_path / "more.pt", {**parameters, "decoder.gate.weight": torch.zeros(1)}, data)
    large = {**parameters, "encoder.fc1.bias": torch.zeros(1).expand(10**12)}  # in a file of a few kilobytes
    for words, name in (
        ((tmp_path / "nowhere.pt", new), "nowhere.pt"),
        ((checkpoint, checkpoint), "old.pt"),
        ((checkpoint, tmp_path / "nowhere" / "new.pt"), "nowhere"),
        ((checkpoint, tmp_path / "link"), "link"),
        ((other, new), f"{other}: "),
        ((ours, new), f"{ours}: "),
        ((more, new), "decoder.gate.weight"),
        ((save(tmp_path / "large.pt", large, data), new), "encoder.fc1.bias"),
        ((tmp_path / "text.pt", new), "text.pt"),
    ):
        assert name in refused("import-fconv", *words)
    assert (tmp_path / "link").is_symlink()
    assert not new.exists()


@pytest.mark.parametrize(
    ("magnitude", "direction"),
    [
        (torch.ones(4, 1), torch.ones(20_000, 0, 20_000)),
        (torch.ones(4, 1), torch.ones(1).expand(20_000, 1, 20_000)),
        (torch.ones(1, 20_000), torch.ones(20_000, 1)),
        (torch.ones(3, 1), torch.ones(4, 5)),
    ],
)
def test_stretched_tensors_are_refused(magnitude: torch.Tensor, direction: torch.Tensor) -> None:
    """A file of a few kilobytes must not allocate gigabytes; the loader refuses tensors larger than the file."""
    parameters = {"encoder.fc1.weight_g": magnitude, "encoder.fc1.weight_v": direction}
    with pytest.raises(ValueError, match="magnitude"):
        convert_parameters(parameters)
