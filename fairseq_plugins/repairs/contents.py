"""Validate the contents of a checkpoint before use.

Its records match their checksums, its tensors are plain numbers that the file has in full, its configuration refers to
nothing, and its optimizer's state fits the parameters and does not choose how torch computes.
"""

from __future__ import annotations

import functools
import io
import pickle
import re
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType, NoneType
from typing import IO, Any

import torch
from fairseq import checkpoint_utils
from fairseq.logging.meters import AverageMeter, StopwatchMeter, TimeMeter
from fairseq.optim import FairseqOptimizer
from torch import Tensor

from fairseq_plugins.common.replaced import replaced
from fairseq_plugins.repairs.wrapping import in_place_of, raises

OLD_METERS = (AverageMeter, StopwatchMeter, TimeMeter)  # which fairseq before 0.10 saved as objects
MOST = 300_000  # values; there is one for each tensor
NUMBERS = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
}
# Hydra takes a backslash away where it stands before a brace, and omegaconf where it stands before a reference.
REFERENCE = re.compile(r"\$\\*\{")
ARCHIVE = b"PK\x03\x04"  # the first bytes by which torch tells its archives from its files before 1.6
# How torch computes an update; its fused kernels believe the sizes of a state.
KERNELS = ("foreach", "fused", "capturable", "differentiable")


def damage_of(file: IO[bytes]) -> str | None:
    """Return what is damaged in a checkpoint, or None; files of torch before 1.6 have no checksums.

    torch reads each record without comparing it with its checksum.
    """
    file.seek(0)
    if file.read(len(ARCHIVE)) != ARCHIVE:
        return None
    place = "its table of records"
    try:
        with zipfile.ZipFile(file) as archive:
            for record in archive.infolist():
                place = f"its record {record.filename!r}"
                with archive.open(record) as content:
                    while record.CRC and content.read(1 << 20):  # torch writes 0 where it is told to compute no sums
                        pass
    except Exception as error:  # a damaged file causes almost any
        return f"{place} is not what was saved: {error}"
    return None


def contents(value: Any, place: str = "it") -> Iterator[tuple[str, Any]]:
    """All that a value holds, itself first, each with its place."""
    yield place, value
    inner: Iterable[tuple[object, Any]] = ()
    if isinstance(value, dict):
        inner = dict.items(value)
    elif isinstance(value, list | tuple | set):
        inner = enumerate(value)
    elif isinstance(value, (Namespace, *OLD_METERS)):
        inner = vars(value).items()
    for key, part in inner:
        if isinstance(key, str | int):
            # Shortened, for each value on the way keeps its own.
            yield from contents(part, f"{place}.{str(key)[:100]}".removeprefix("it.")[-300:])
        else:
            yield from contents((key, part), place)


def reference_in(value: Any) -> str | None:
    """The place and the text of a ``${...}``, which omegaconf would replace: by another value, or the environment's."""
    for place, text in contents(value):
        if isinstance(text, str) and REFERENCE.search(text):
            return f"{place} is {text[:100]!r}, and nothing is read that refers to another value"
    return None


def fault_of(tensor: Tensor) -> str | None:
    """What is wrong with a tensor; asked of its class, for a file can give it attributes of any name."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_nested or tensor.layout is not torch.strided:
        return "no plain tensor"
    if tensor.dtype not in NUMBERS or tensor.device.type != "cpu":
        return f"a tensor of {tensor.dtype} on the device {tensor.device}"
    size = Tensor.numel(tensor) * Tensor.element_size(tensor)
    if size > Tensor.untyped_storage(tensor).nbytes():
        return f"a tensor of {size} bytes, which the file does not have"
    return None


def check_parts(state: dict[str, Any]) -> None:
    """Refuse a part of another kind, or with keys that are not names.

    Raises:
        ValueError: names the part.
    """
    for name, kind in (("cfg", dict), ("args", Namespace), ("extra_state", dict), ("task_state", dict)):
        part = state.get(name)
        if not isinstance(part, kind | NoneType):
            raise ValueError(f"its {name} must be a {kind.__name__}, got {type(part).__name__}")
        if isinstance(part, dict) and (odd := [key for key in part if not isinstance(key, str)]):
            raise ValueError(f"its {name} must have names for keys, got a {type(odd[0]).__name__}")


def check(state: Any) -> None:
    """Refuse a state that is not a checkpoint of fairseq or would harm its user.

    Raises:
        ValueError: names the part that is wrong.
    """
    if type(state) is not dict or not isinstance(state.get("model"), dict):
        raise ValueError("it holds no parameters of a model")
    for name, value in dict.items(state["model"]):
        if not isinstance(name, str) or not isinstance(value, Tensor):
            shown = repr(name[:100]) if isinstance(name, str) else f"of {type(name).__name__}"
            raise ValueError(f"its parameter {shown} is no tensor with a name")
    check_parts(state)
    for count, (place, value) in enumerate(contents(state)):
        if count == MOST:
            raise ValueError(f"it holds more than {MOST} values")
        if isinstance(value, Tensor) and (fault := fault_of(value)):
            raise ValueError(f"{place} is {fault}")
        if isinstance(value, dict | Tensor) and (odd := [*{*getattr(value, "__dict__", ())} - {"_metadata"}]):
            raise ValueError(f"{place} has an attribute {odd[0]!r}, which would hide what it holds")
    versions = getattr(state["model"], "_metadata", None) or {}
    if not isinstance(versions, dict) or not all(isinstance(each, dict) for each in dict.values(versions)):
        raise ValueError("its model has no versions of its modules where torch looks for them")
    if found := reference_in({name: state.get(name) for name in ("cfg", "args")}):
        raise ValueError(found)


def load_from_memory(load: Callable[[str], Any], state: object) -> Any:
    """For probes: what fairseq's loader makes of a state; nothing may be written where an import happens."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    with replaced(checkpoint_utils, "open", lambda *_, **__: file):
        return load("probe.pt")


def follows_references(load: Callable[[str], Any]) -> bool:
    """Probe: whether a file's configuration can refer to another of its values."""
    state = {"cfg": {"seed": 1, "of": "${seed}"}, "model": {}, "extra_state": {"train_iterator": {}}}
    history = {"optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 0}
    try:
        return bool(load_from_memory(load, {**state, "optimizer_history": [history]})["cfg"].of == 1)
    except pickle.UnpicklingError:
        return False


class CheckingTorch(ModuleType):
    """What stands for torch where fairseq reads checkpoints: torch itself, but `check` sees what it loads."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def load(file: IO[bytes], **kwargs: Any) -> Any:
        """Load an undamaged file as torch does, without its advice to switch the check of files off."""
        if (damage := damage_of(file)) is not None:
            raise OSError(damage)
        file.seek(0)
        try:
            state = torch.load(file, **kwargs)
        except RuntimeError as error:
            if "weights_only" not in str(error):
                raise
            kinds = "TorchScript, or of a torch before 0.1.10"
            raise ValueError(
                f"it is {kinds}, of which data cannot be read alone; save it anew as a state_dict"
            ) from None
        check(state)
        return state


def look_at_what_is_read() -> None:
    """fairseq uses whatever a file has: it follows references, into the environment too, and tensors of which torch
    believes the file that they are sparse, or large.
    """
    if follows_references(checkpoint_utils.load_checkpoint_to_cpu):
        checkpoint_utils.torch = CheckingTorch("torch")


def fits(shape: torch.Size, parameter: torch.Size) -> bool:
    """Whether a state can be a parameter's: its own size, a single number, or (Adafactor) its rows' or its columns'."""
    return shape in (parameter, torch.Size(), parameter[:-1], parameter[:-2] + parameter[-1:])


@functools.cache
def takes_any_state(load: Callable[..., None]) -> bool:
    """Probe: whether ``load`` takes a moment of another size than its parameter."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = FairseqOptimizer(None)
    optimizer._optimizer = torch.optim.SGD([parameter], lr=0.0)
    state = optimizer.state_dict()
    return not raises(ValueError, load, optimizer, {**state, "state": {0: {"momentum_buffer": torch.zeros(3)}}})


def tensor_sizes(state: Any, parameters: Iterable[Tensor]) -> list[tuple[str, torch.Size, torch.Size]]:
    """Name and size of each tensor in an optimizer's state, and the size of the parameter that it is of.

    Raises:
        ValueError: it is no such state.
    """
    try:
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        return [
            (name, value.shape, parameter.shape)
            for number, parameter in zip(numbers, parameters, strict=False)  # of their numbers torch itself complains
            for name, value in state["state"].get(number, {}).items()
            if isinstance(value, Tensor)
        ]
    except (AttributeError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"the checkpoint's state of the optimizer is none: {reason}") from None


def fit_optimizer_states() -> None:
    """fairseq takes the optimizer's state as it stands in a file, with the kernels that the file asks for.

    Sizes that do not fit are refused, and kernels are those of this training.  The probe comes with the first state: it
    needs an optimizer of torch's, which imports its compiler, and that takes a second.
    """
    load = FairseqOptimizer.load_state_dict

    @in_place_of(FairseqOptimizer, "load_state_dict")
    def load_state_dict(self: Any, state_dict: Any, optimizer_overrides: Any = None) -> None:
        if not takes_any_state(load):
            load(self, state_dict, optimizer_overrides)
            return
        for name, size, parameter in tensor_sizes(state_dict, self.params):
            if not fits(size, parameter):
                raise ValueError(
                    f"the checkpoint's state of the optimizer has {name} of {list(size)} for a parameter of "
                    f"{list(parameter)}; --reset-optimizer leaves it out"
                )
        own = [{name: group[name] for name in KERNELS if name in group} for group in self.param_groups]
        load(self, state_dict, optimizer_overrides)
        for group, kernels in zip(self.param_groups, own, strict=True):
            for name in KERNELS:
                group.pop(name, None)
            group.update(kernels)
