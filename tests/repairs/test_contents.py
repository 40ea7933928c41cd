"""Contents of checkpoints: references, special tensors and malformed parts are refused."""

from __future__ import annotations

import argparse
import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq import checkpoint_utils, optim
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.optim import FairseqOptimizer
from omegaconf import OmegaConf

from fairseq_plugins.common.options import flag
from fairseq_plugins.repairs.checkpoints import check, contents
from tests.commands import USER_DIR, run
from tests.repairs.payloads import Pickled

NAME = "encoder.embed_tokens.weight"
WORD = "a-word-of-the-environment"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", WORD)


def with_option(state: dict[str, Any], part: str, **options: Any) -> dict[str, Any]:
    return {**state, "cfg": {**state["cfg"], part: {**state["cfg"][part], **options}}}


REFERENCES = ["${oc.env:SECRET}", "${env:SECRET}", "${oc.decode:'${oc.env:SECRET}'}", "${common.seed}", "a ${.seed}"]
PLACES: dict[str, Callable[[dict[str, Any], str], dict[str, Any]]] = {
    "an option": lambda state, text: with_option(state, "common", wandb_project=text),
    "the data": lambda state, text: with_option(state, "task", data=text),
    "a list": lambda state, text: with_option(state, "optimization", lr=[0.1, text]),
    "a namespace": lambda state, text: {**state, "cfg": {**state["cfg"], "model": argparse.Namespace(arch=text)}},
    "an old checkpoint": lambda state, text: {**state, "cfg": None, "args": argparse.Namespace(wandb_project=text)},
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("text", REFERENCES)
def test_references_in_a_checkpoint_are_refused(place: str, text: str, state: dict[str, Any], tmp_path: Path) -> None:
    torch.save(PLACES[place](state, text), tmp_path / "model.pt")
    with pytest.raises(Exception, match=r"model\.pt was refused: .* refers to another value") as error:
        checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "model.pt"))
    assert WORD not in str(error.value)


@pytest.mark.parametrize(
    "text", [*REFERENCES, r"\${oc.env:SECRET}", r"$\{oc.env:SECRET\}", "${save_dir}", "${checkpoint.restore_file}"]
)
def test_references_in_an_option_are_refused(text: str, data: Path) -> None:
    for name in ("save_dir", "tokenizer", "arch", "encoder_embed_path", "data"):
        with pytest.raises(ValueError, match=f"^{name if name == 'data' else flag(name)}: "):
            convert_namespace_to_omegaconf(argparse.Namespace(**{"arch": "transformer_tiny", name: text}))


@pytest.mark.parametrize(
    ("text", "option"), [("${oc.env:SECRET}", "--model-overrides"), ("\\x24{oc.env:SECRET}", "wandb_project")]
)
def test_references_in_an_override_are_refused(
    text: str, option: str, state: dict[str, Any], data: Path, tmp_path: Path
) -> None:
    torch.save(state, tmp_path / "model.pt")
    overrides = f"{{'wandb_project': '{text}'}}"
    options = ["--user-dir", USER_DIR, "--path", tmp_path / "model.pt", "--model-overrides", overrides]
    failed = run("generate", data, *options, succeeds=False)
    assert f"{option}: " in failed.stderr
    assert WORD not in failed.stderr + failed.stdout


def compressed() -> torch.Tensor:
    """Return a sparse tensor with indices beyond its size, which torch does not check."""
    places, columns = torch.tensor([0, 5, 10**6]), torch.tensor([10**9, -(10**9), 3])
    return torch.sparse_compressed_tensor(
        places, columns, torch.ones(3), (2, 2), layout=torch.sparse_csr, check_invariants=False
    )


def with_attributes() -> Pickled:
    """Return a tensor whose attributes claim that it has no elements."""
    large = torch.ones(1).expand(10**12)
    return Pickled(torch._utils._rebuild_parameter_with_state, (large, False, {}, {"numel": set, "element_size": set}))


BOUNDS = "(`0 <= col_indices < ncols` is not satisfied|size is inconsistent with indices)"
PLAIN, HUGE = "is not a plain tensor", "bytes, more than the file has"
TENSORS: dict[str, tuple[Callable[[], Any], str]] = {
    "compressed": (compressed, PLAIN),
    "sparse": (lambda: torch.ones(2, 3).to_sparse(), PLAIN),
    "sparse, out of bounds": (
        lambda: torch.sparse_coo_tensor(torch.tensor([[9], [-9]]), torch.ones(1), (2, 2), check_invariants=False),
        PLAIN,
    ),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), PLAIN),
    "meta": (lambda: torch.ones(2, 3, device="meta"), "on the device meta"),
    "complex": (lambda: torch.ones(2, 3, dtype=torch.complex64), "a tensor of torch.complex64"),
    "quantised": (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "a tensor of torch.qint8"),
    "expanded": (lambda: torch.ones(1).expand(10**12), HUGE),
    "overlapping": (lambda: torch.ones(100).as_strided((50, 50), (1, 1)), HUGE),
    "with attributes": (with_attributes, HUGE),
    "a text": (lambda: "text", "must be a tensor with a string as its name"),
    "nothing": (lambda: None, "must be a tensor with a string as its name"),
}


@pytest.mark.parametrize("place", ["model", "optimizer", "moving averages"])
@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_that_are_not_plain_are_refused(kind: str, place: str, state: dict[str, Any], tmp_path: Path) -> None:
    make, message = TENSORS[kind]
    hostile = {
        "model": {"model": {**state["model"], NAME: make()}},
        "optimizer": {"last_optimizer_state": {"state": {0: {"exp_avg": make()}}}},
        "moving averages": {"extra_state": {**state["extra_state"], "ema": {NAME: make()}}},
    }
    torch.save({**state, **hostile[place]}, tmp_path / "model.pt")
    if place != "model" and kind in ("a text", "nothing"):
        pytest.skip("a valid value there")
    # torch 2.6 itself rejects indices that are out of bounds.
    with pytest.raises(
        Exception, match=rf"model\.pt (was refused: .*{message}|is damaged and cannot be read: {BOUNDS})"
    ):
        checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "model.pt"))
    with pytest.raises((ValueError, RuntimeError), match=rf"{message}|{BOUNDS}"):
        checkpoint_utils.load_ema_from_checkpoint(str(tmp_path / "model.pt"))


def test_advice_to_switch_the_check_off_is_not_repeated(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "model.pt")
    with pytest.raises(Exception, match=r"model\.pt was refused: it is TorchScript, or") as error:
        checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "model.pt"))
    assert "weights_only" not in str(error.value)


class Hiding:
    """A dictionary whose own methods hide its parameter."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter = parameter

    def __reduce__(self) -> Any:
        return OrderedDict, (), {"items": OrderedDict, "keys": set}, None, iter([(NAME, self.parameter)])


def test_names_of_places_are_short() -> None:
    """A small file may repeat a long key, and the nested paths of such keys would fill gigabytes."""
    value: Any = torch.sparse_coo_tensor(size=(1,))
    for _ in range(250):
        value = {"k" * 100_000: value}
    assert max(len(place) for place, _ in contents(value)) <= 300
    with pytest.raises(ValueError, match="kkk is not a plain tensor"):
        check({"model": {}, "x": value})


@pytest.mark.parametrize("parameter", [compressed(), torch.ones(2)], ids=["compressed", "plain"])
def test_a_hidden_parameter_is_refused(parameter: torch.Tensor, state: dict[str, Any], tmp_path: Path) -> None:
    torch.save({**state, "model": Hiding(parameter)}, tmp_path / "model.pt")
    with pytest.raises(Exception, match=f"model has an attribute|{BOUNDS}"):
        checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "model.pt"))


@pytest.mark.parametrize("versions", ["text", {"": "text"}, {"encoder": None}])
def test_malformed_versions_are_refused(versions: object, state: dict[str, Any], tmp_path: Path) -> None:
    """torch reads versions from a parameter table when a model loads it."""
    model = OrderedDict(state["model"])
    model._metadata = versions  # type: ignore[attr-defined]
    torch.save({**state, "model": model}, tmp_path / "model.pt")
    with pytest.raises(pickle.UnpicklingError, match=r"model\.pt was refused: .*_metadata"):
        checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "model.pt"))


def endless() -> dict[str, Any]:
    endless: dict[str, Any] = {}
    endless["inside"] = endless
    return endless


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": None}, "no model parameters"),
        ({"model": "text"}, "no model parameters"),
        ({"model": [torch.ones(1)]}, "no model parameters"),
        ({"model": {3: torch.ones(1)}}, "parameter of int must be a tensor with a string"),
        ({"cfg": []}, "its cfg must be a dict"),
        ({"cfg": "common: {seed: '\\x24{oc.env:SECRET}'}"}, "its cfg must be a dict"),
        ({"args": {"arch": "fconv"}}, "its args must be a Namespace"),
        ({"extra_state": ["words"]}, "its extra_state must be a dict"),
        ({"extra_state": {1: "epoch"}}, "its extra_state must have only strings as keys"),
        ({"task_state": {None: "candidates"}}, "its task_state must have only strings as keys"),
        ({"extra_state": {"list": [[]] * 400_000}}, "more than 300000 values"),
        ({"extra_state": endless()}, "recursion"),
    ],
)
def test_malformed_parts_are_refused(
    change: dict[str, Any], message: str, state: dict[str, Any], tmp_path: Path
) -> None:
    torch.save({**state, **change}, tmp_path / "model.pt")
    with pytest.raises(Exception, match=rf"model\.pt .*{message}"):
        checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "model.pt"))


def optimizer(name: str, *parameters: torch.nn.Parameter) -> FairseqOptimizer:
    registered, parser = optim.OPTIMIZER_REGISTRY[name], argparse.ArgumentParser()
    registered.add_args(parser)
    cfg = OmegaConf.create({**vars(parser.parse_args([])), "lr": [0.1], "tpu": False, "_name": name})
    return registered(cfg, list(parameters))


def step(stepping: FairseqOptimizer) -> None:
    for parameter in stepping.params:
        parameter.grad = torch.ones_like(parameter)
    stepping.step()


@pytest.mark.parametrize("name", ["sgd", "nag", "adam", "adagrad", "adadelta", "adafactor", "adamax"])
def test_states_of_other_sizes_are_refused(name: str) -> None:
    """The check applies when the optimizer loads its state."""
    parameter = torch.nn.Parameter(torch.ones(4, 6))
    trained = optimizer(name, parameter)
    step(trained)
    resumed = optimizer(name, torch.nn.Parameter(parameter.detach().clone()))
    resumed.load_state_dict(copy.deepcopy(trained.state_dict()))
    step(resumed)
    step(trained)
    torch.testing.assert_close(list(resumed.params), list(trained.params))
    saved = trained.state_dict()
    if not saved["state"]:
        return
    for size in ((1,), (), (4,), (6,)):
        moments = {
            key: torch.ones(size) if torch.is_tensor(value) else value for key, value in saved["state"][0].items()
        }
        with pytest.raises(ValueError, match=r"has \w+ of size \[\d?\] for a parameter of size \[4, 6\]"):
            resumed.load_state_dict({**saved, "state": {0: moments}})


def test_a_checkpoint_does_not_choose_kernels() -> None:
    resumed = optimizer("adagrad", torch.nn.Parameter(torch.ones(4)))
    before = [dict(group) for group in resumed.param_groups]
    saved = resumed.state_dict()
    saved["param_groups"][0] |= dict.fromkeys(("foreach", "fused", "capturable", "differentiable"), True)
    resumed.load_state_dict(saved)
    assert [dict(group) for group in resumed.param_groups] == before


@pytest.mark.parametrize("state", [None, [], {}, {"param_groups": 3, "state": {}}, {"param_groups": [{}], "state": []}])
def test_a_malformed_optimizer_state_is_refused(state: Any) -> None:
    with pytest.raises(ValueError, match="optimizer state is malformed"):
        optimizer("adagrad", torch.nn.Parameter(torch.ones(4))).load_state_dict(state)
