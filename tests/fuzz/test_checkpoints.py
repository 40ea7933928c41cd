"""Checkpoints, damaged and hostile: read by fairseq with the plugin, and converted by ``import-fconv``."""

from __future__ import annotations

import argparse
import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from fairseq.logging import meters
from fairseq.models import ARCH_CONFIG_REGISTRY
from fairseq.models.fconv import FConvModel
from hypothesis import given
from hypothesis import strategies as st

from fairseq_plugins.tools import import_fconv
from tests.fuzz.texts import texts
from tests.fuzz.trial import Trial, fuzz

OPTIONS = {
    "arch": "fconv",
    "encoder_layers": "[(4, 3)]",
    "decoder_layers": "[(4, 3)]",
    "encoder_embed_dim": 4,
    "decoder_embed_dim": 4,
    "decoder_out_embed_dim": 4,
    "max_source_positions": 6,
    "max_target_positions": 6,
}
GLOBALS = """posix.system builtins.eval builtins.exec builtins.getattr builtins.__import__ builtins.print os.popen
    subprocess.Popen argparse.Namespace collections.OrderedDict collections.Counter numpy.dtype numpy.ndarray __main__.x
    numpy.core.multiarray._reconstruct numpy.core.multiarray.scalar numpy._core.multiarray.scalar torch.FloatStorage
    torch._utils._rebuild_tensor_v2 torch._utils._rebuild_parameter torch._utils._rebuild_sparse_tensor torch.Tensor
    fairseq.logging.meters.AverageMeter fairseq.meters.TimeMeter fairseq.distributed.utils._TensorPlaceholder
    fairseq_plugins.compat.checkpoints.PlainArray fairseq_plugins.compat.checkpoints.plain_scalar torch.load"""
OPCODES = [
    *(b"c" + "\n".join(name.rsplit(".", 1)).encode() + b"\n" for name in GLOBALS.split()),
    *(bytes([code]) for code in b"()]}ltdRbo\x81ea\x85\x86\x87su0N\x88\x89Q.2"),
    *(b"K\x00", b"K\x01", b"J\xff\xff\xff\x7f", b"\x8a\x08" + b"\x7f" * 8, b"G" + b"\x7f" * 8),  # numbers
    *(b"q\x00", b"h\x00", b"r\xff\xff\xff\x7f"),  # memory
    *(b"X" + len(text).to_bytes(4, "little") + text.encode() for text in ("", "0", "i8", "O8", "cpu", "storage", "x")),
    *(b"X\xff\xff\xff\x7fa", b"B\xff\xff\xff\x7fa"),  # more text than there is
]  # fmt: skip
codes = st.sampled_from(OPCODES) | st.binary(max_size=4)
changes = st.lists(
    st.tuples(st.floats(0, 1), st.integers(0, 9), st.lists(codes, max_size=8).map(b"".join)), min_size=1, max_size=4
)
programs = st.lists(codes, max_size=20).map(lambda codes: b"\x80\x02" + b"".join(codes) + b".")


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    """A checkpoint of fairseq's fconv, with what old ones hold."""
    args = argparse.Namespace(**OPTIONS)
    ARCH_CONFIG_REGISTRY["fconv"](args)
    task = argparse.Namespace(source_dictionary=Dictionary(), target_dictionary=Dictionary())
    history = {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 0}
    return {
        "args": None,
        "cfg": {"model": vars(args), "task": {"_name": "translation"}},
        "model": FConvModel.build_model(args, task).state_dict(),
        "optimizer_history": [{**history, "best_loss": np.float64(2.5)}],
        "extra_state": {"train_iterator": {"epoch": 1}, "sums": np.ones(2), "meter": meters.AverageMeter()},
    }


def saved(state: object, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file, **options)
    return file.getvalue()


def changed(data: bytes, changes: list[tuple[float, int, bytes]]) -> bytes:
    """Some bytes replaced by others, at places given as fractions of the whole."""
    for place, length, codes in changes:
        position = int(place * len(data))
        data = data[:position] + codes + data[position + length :]
    return data


def with_pickle(archive: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """The archive with another ``data.pkl`` and check sums that are right: torch gets as far as reading it."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as before, zipfile.ZipFile(file, "w") as after:
        for name in before.namelist():
            content = before.read(name)
            after.writestr(name, change(content) if name.endswith("data.pkl") else content)
    return file.getvalue()


def hostile(state: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """Checkpoints in both of torch's formats, damaged anywhere or in their pickle, or with a program for a pickle."""
    new, old = saved(state), saved(state, _use_new_zipfile_serialization=False)
    return st.one_of(
        changes.map(lambda changes: with_pickle(new, lambda data: changed(data, changes))),
        programs.map(lambda program: with_pickle(new, lambda _: program)),
        changes.map(lambda changes: changed(new, changes)),
        changes.map(lambda changes: changed(old, changes)),
        st.floats(0, 1).map(lambda end: new[: int(end * len(new))]),
        programs,
    )


def test_loading(state: dict[str, Any], file: Path) -> None:
    trial = Trial(checkpoint_utils.load_checkpoint_to_cpu, pickle.UnpicklingError, EOFError, OSError, RuntimeError)
    file.write_bytes(saved(state))
    assert trial(str(file)) is not None

    @fuzz
    @given(hostile(state))
    def run(data: bytes) -> None:
        file.write_bytes(data)
        trial(str(file))

    run()


values = st.one_of(
    *(texts, st.integers(), st.floats(), st.none(), st.booleans(), st.just({}), st.just("${x}")),
    st.lists(st.integers(), max_size=3),
)
shapes = st.lists(st.integers(0, 5), min_size=1, max_size=4)
kinds = st.sampled_from([torch.float32, torch.float16, torch.int64, torch.complex64, torch.bool])
tensors = st.one_of(
    st.builds(lambda shape, kind: torch.ones(shape, dtype=kind), shapes, kinds),
    shapes.map(lambda shape: torch.ones(1).expand([10**4 * size for size in shape])),  # large on the outside only
    st.just(torch.ones(2, 3).to_sparse()),
    values,
)
modules = [
    "fc1",
    "fc2",
    "convolutions.0",
    "embed_tokens",
    "embed_positions",
    "attention.0.in_projection",
    "projections.0",
    "x",
]
names = st.builds(
    "{}.{}.{}".format,
    st.sampled_from(["encoder", "decoder", "x"]),
    st.sampled_from(modules),
    st.sampled_from(["weight", "weight_g", "weight_v", "bias"]),
) | st.sampled_from(["", "x", "decoder.version", "decoder.", ".."])
entries = st.sampled_from(["cfg", "model", "args", "optimizer_history", "extra_state", "task_state", "x"])
options = st.dictionaries(st.sampled_from([*OPTIONS, "x", "_name", "decoder_attention"]), values, max_size=3)


def test_import_of_fconv(state: dict[str, Any], file: Path) -> None:
    new = file.with_name("new.pt")
    trial = Trial(import_fconv.run, ValueError, OSError, pickle.UnpicklingError)
    paths = argparse.Namespace(input=file, output=new)

    def altered(options: dict[str, Any], parameters: dict[str, Any], entries: dict[str, Any]) -> bytes:
        cfg = {**state["cfg"], "model": {**state["cfg"]["model"], **options}}
        return saved({**state, "cfg": cfg, "model": {**state["model"], **parameters}, **entries})

    file.write_bytes(altered({}, {}, {}))
    trial(paths)
    assert new.exists()

    parameters = st.dictionaries(names, tensors, max_size=3)
    altered_files = st.builds(altered, options, parameters, st.dictionaries(entries, values, max_size=1))

    @fuzz
    @given(hostile(state) | altered_files)
    def run(data: bytes) -> None:
        new.unlink(missing_ok=True)
        file.write_bytes(data)
        trial(paths)
        assert not list(file.parent.glob("*.partial"))

    run()
