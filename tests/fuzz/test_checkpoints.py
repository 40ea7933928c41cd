"""Damaged and hostile checkpoints, read by fairseq with the plugin, and converted by ``import-fconv``."""

from __future__ import annotations

import argparse
import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from fairseq.logging import meters
from fairseq.models import ARCH_CONFIG_REGISTRY
from fairseq.models.fconv import FConvModel

import fairseq_plugins.convs2s.fconv  # noqa: F401  (imported when the command runs, it would look like code of the file)
from fairseq_plugins.cli import import_fconv
from tests.fuzz.texts import integer, number, several, text
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
    fairseq_plugins.repairs.checkpoints.PlainArray fairseq_plugins.repairs.checkpoints.plain_scalar torch.load"""
OPCODES = [
    *(b"c" + "\n".join(name.rsplit(".", 1)).encode() + b"\n" for name in GLOBALS.split()),
    *(bytes([code]) for code in b"()]}ltdRbo\x81ea\x85\x86\x87su0N\x88\x89Q.2"),
    *(b"K\x00", b"K\x01", b"J\xff\xff\xff\x7f", b"\x8a\x08" + b"\x7f" * 8, b"G" + b"\x7f" * 8),  # numbers
    *(b"q\x00", b"h\x00", b"r\xff\xff\xff\x7f"),  # operations on pickle's memo
    *(b"X" + len(text).to_bytes(4, "little") + text.encode() for text in ("", "0", "i8", "O8", "cpu", "storage", "x")),
    *(b"X\xff\xff\xff\x7fa", b"B\xff\xff\xff\x7fa"),  # a length beyond the end of the text
]  # fmt: skip


def code(random: Random) -> bytes:
    return random.choice(OPCODES) if random.random() < 0.8 else random.randbytes(random.randint(0, 4))


def codes(random: Random, most: int) -> bytes:
    return b"".join(several(random, code, 0, most))


def program(random: Random) -> bytes:
    return b"\x80\x02" + codes(random, 20) + b"."


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    """Return a checkpoint of fairseq's fconv with the parts that old checkpoints have."""
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


def changed(data: bytes, random: Random) -> bytes:
    for _ in range(random.randint(1, 4)):
        position, new = random.randint(0, len(data)), codes(random, 8)
        end = position + random.choice([len(new), random.randint(0, 9)])
        data = data[:position] + new + data[end:]
    return data


def with_pickle(archive: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """Return the archive with another ``data.pkl`` and matching checksums, so that torch reads it."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as before, zipfile.ZipFile(file, "w") as after:
        for name in before.namelist():
            content = before.read(name)
            after.writestr(name, change(content) if name.endswith("data.pkl") else content)
    return file.getvalue()


Checkpoints = Callable[[Random], bytes]


def hostile(state: dict[str, Any]) -> Checkpoints:
    """Return a function that makes checkpoints in both of torch's formats, damaged or with a hostile program."""
    new, old = saved(state), saved(state, _use_new_zipfile_serialization=False)
    kinds: list[Checkpoints] = [
        lambda random: with_pickle(new, lambda data: changed(data, random)),
        lambda random: with_pickle(new, lambda _: program(random)),
        lambda random: changed(new, random),
        lambda random: changed(old, random),
        lambda random: new[: random.randint(0, len(new))],
        program,
    ]
    return lambda random: random.choice(kinds)(random)


def test_loading(state: dict[str, Any], file: Path) -> None:
    trial = Trial(checkpoint_utils.load_checkpoint_to_cpu, pickle.UnpicklingError, EOFError, OSError, RuntimeError)
    file.write_bytes(saved(state))
    assert trial(str(file)) is not None
    damaged = hostile(state)

    @fuzz
    def run(random: Random) -> None:
        file.write_bytes(damaged(random))
        trial(str(file))


TYPES = [torch.float32, torch.float16, torch.int64, torch.complex64, torch.bool]
MODULES = "fc1 fc2 convolutions.0 embed_tokens embed_positions attention.0.in_projection projections.0 x"
ENTRIES = ["cfg", "model", "args", "optimizer_history", "extra_state", "task_state", "x"]


def value(random: Random) -> Any:
    if random.random() < 0.5:
        return random.choice([text, integer, number])(random)
    return random.choice([None, True, False, {}, "${x}", several(random, integer, 0, 3)])


def tensor(random: Random) -> Any:
    shape = [random.randint(0, 5) for _ in range(random.randint(1, 4))]
    if random.random() < 0.5:
        return torch.ones(shape, dtype=random.choice(TYPES))
    large = torch.ones(1).expand([10**4 * size for size in shape])  # large only by its shape: it stores one number
    return random.choice([large, torch.ones(2, 3).to_sparse(), value(random)])


def name(random: Random) -> str:
    if random.random() < 0.3:
        return random.choice(["", "x", "decoder.version", "decoder.", ".."])
    parts = ["encoder", "decoder", "x"], MODULES.split(), ["weight", "weight_g", "weight_v", "bias"]
    return ".".join(map(random.choice, parts))


def test_import_of_fconv(state: dict[str, Any], file: Path) -> None:
    new = file.with_name("new.pt")
    trial = Trial(import_fconv.run, ValueError, OSError, pickle.UnpicklingError)
    paths = argparse.Namespace(input=file, output=new, user_dir=None)

    def altered(options: dict[str, Any], parameters: dict[str, Any], entries: dict[str, Any]) -> bytes:
        cfg = {**state["cfg"], "model": {**state["cfg"]["model"], **options}}
        return saved({**state, "cfg": cfg, "model": {**state["model"], **parameters}, **entries})

    def some(random: Random) -> bytes:
        options = random.choices([*OPTIONS, "x", "_name", "decoder_attention"], k=random.randint(0, 3))
        entries = random.choices(ENTRIES, k=random.randint(0, 1))
        return altered(
            {option: value(random) for option in options},
            dict(several(random, lambda random: (name(random), tensor(random)), 0, 3)),
            {entry: value(random) for entry in entries},
        )

    file.write_bytes(altered({}, {}, {}))
    trial(paths)
    assert new.exists()
    damaged = hostile(state)

    @fuzz
    def run(random: Random) -> None:
        new.unlink(missing_ok=True)
        file.write_bytes(random.choice([damaged, some])(random))
        trial(paths)
        assert not list(file.parent.glob("*.tmp"))
