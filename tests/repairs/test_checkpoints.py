"""Checkpoints contain data only: other classes are refused, and two processes resume from a checkpoint."""

from __future__ import annotations

import argparse
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.distributed import utils as distributed_utils
from fairseq.logging import meters

from tests.repairs.payloads import Payload, Pickled


def crafted_array(dtype: object, data: object = b"A" * 16) -> Pickled:
    reconstruct, arguments, _ = np.zeros(1).__reduce__()
    return Pickled(reconstruct, arguments, (1, (2,), dtype, False, data))


@pytest.mark.parametrize("place", ["cfg", "args", "optimizer_history", "extra_state", "model"])
def test_a_foreign_class_is_refused_and_not_run(place: str, tmp_path: Path) -> None:
    payload = Payload(tmp_path / "trace")
    state = {"args": None, "cfg": {}, "model": {}, "optimizer_history": [{}], "extra_state": {}}
    hidden = {"args": argparse.Namespace(arch=payload), "optimizer_history": [{"lr_scheduler_state": payload}]}
    torch.save({**state, place: hidden.get(place, {"key": [payload]})}, tmp_path / "model.pt")
    with pytest.raises(Exception, match=r"model\.pt was refused: it holds posix\.system") as error:
        checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "model.pt"))
    assert "weights_only" not in str(error.value)
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize(
    "hostile",
    [
        # A structure may hide an object; in the two object arrays, numpy would use the bytes as pointers.
        crafted_array(Pickled(np.dtype, ("V8", False, True), (3, "|", None, ("x",), {"x": (1, 0)}, 8, 1, 0))),
        crafted_array(Pickled(np.dtype, ("O8", False, True), (3, "|", None, None, None, -1, -1, 0))),
        crafted_array(Pickled(np.dtype, ("i8", False, True), (3, "O,", None, None, None, -1, -1, 0))),
        crafted_array(np.dtype("i8"), b"A" * 8),  # the shape is larger than the array's bytes
        Pickled(np.float64(0).__reduce__()[0], (np.dtype("O"), b"A" * 8)),
        Pickled(distributed_utils._TensorPlaceholder, (print,)),
        Pickled(argparse.Namespace, (), {"arch": eval}),
        Pickled(getattr, (argparse.Namespace, "__init__")),
    ],
    ids=["structure", "object", "byte order", "shape", "scalar", "placeholder", "attribute", "getattr"],
)
def test_allowed_classes_cannot_be_misused(hostile: Pickled, tmp_path: Path) -> None:
    torch.save({"cfg": {}, "extra_state": hostile}, tmp_path / "model.pt")
    with pytest.raises(Exception, match=r"was refused|cannot reshape"):
        checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "model.pt"))


def test_torchs_check_cannot_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(Payload(tmp_path / "trace"), tmp_path / "model.pt")
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    for load in (checkpoint_utils.load_checkpoint_to_cpu, checkpoint_utils.load_ema_from_checkpoint):
        with pytest.raises((ValueError, pickle.UnpicklingError), match=r"it holds posix\.system"):
            load(str(tmp_path / "model.pt"))
    assert not (tmp_path / "trace").exists()
    torch.load(tmp_path / "model.pt")
    assert (tmp_path / "trace").exists()


@pytest.mark.parametrize("dtype", ["?", "<u2", "<i8", ">i4", "<f4", "<f8", "<c8"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_plain_arrays_come_back(dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    values = np.asfortranarray(np.arange(np.prod(shape, dtype=int)).reshape(shape)).astype(dtype)
    scalar = np.ones((), dtype)[()]
    for _ in range(2):  # the second time, the loaded values are saved again
        torch.save({"array": values, "scalar": scalar}, tmp_path / "arrays.pt")
        assert b"fairseq_plugins" not in (tmp_path / "arrays.pt").read_bytes()
        read = torch.load(tmp_path / "arrays.pt")
        np.testing.assert_array_equal(read["array"], values)
        assert read["array"].dtype == np.dtype(dtype).newbyteorder("=")  # numpy converts to the machine's byte order
        assert type(read["scalar"]) is type(scalar)
        assert read["scalar"] == scalar
        values, scalar = read["array"], read["scalar"]


def test_a_checkpoint_of_old_fairseq_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint has an ``args`` Namespace, meters as objects of ``fairseq.meters``, and a numpy number."""
    meter = meters.AverageMeter()
    meter.update(3.0)
    args = argparse.Namespace(arch="fconv_iwslt_de_en", task="translation", lr=0.25, min_lr=1e-5, data=["data"])
    old = {
        "args": args,
        "model": {"weight": torch.ones(1)},
        "optimizer_history": [{"best_loss": np.float64(2.5), "optimizer": {"state": {}}}],
        "extra_state": {"epoch": 2, "train_meters": {"loss": meter, "wps": meters.TimeMeter()}},
    }
    with monkeypatch.context() as patch:
        for kind in (meters.AverageMeter, meters.TimeMeter):
            patch.setattr(kind, "__module__", "fairseq.meters")
        torch.save(old, tmp_path / "old.pt")
    state = checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "old.pt"))
    assert state["cfg"].model.arch == "fconv_iwslt_de_en"
    assert state["optimizer_history"][-1]["lr_scheduler_state"] == {"best": 2.5}
    assert state["extra_state"]["train_meters"]["loss"].avg == 3.0
