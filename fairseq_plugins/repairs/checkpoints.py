"""Checkpoints contain data and no code; their contents are validated before use.

torch's restricted unpickler reads checkpoints and builds only allowed classes.  Some classes in fairseq's
checkpoints could run code or corrupt memory; stand-ins replace these classes.
"""

from __future__ import annotations

import argparse
import pickle
import re
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType, NoneType
from typing import IO, Any

import numpy as np
import torch
from fairseq import checkpoint_utils
from fairseq.distributed import utils as distributed_utils
from fairseq.logging.meters import AverageMeter, StopwatchMeter, TimeMeter
from fairseq.optim import FairseqOptimizer
from omegaconf import OmegaConf
from torch import Tensor

from fairseq_plugins.repairs.saving import damage_of, newest_whole_checkpoint
from fairseq_plugins.repairs.wrapping import repair, wrap

OLD_METERS = (AverageMeter, StopwatchMeter, TimeMeter)  # fairseq before 0.10 saved meters as objects
MOST_VALUES = 300_000  # maximum number of values in a checkpoint; a tensor counts as one value
NUMBERS = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
}
# A reference is ``${...}``.  Hydra removes a backslash before a brace, and omegaconf removes a backslash before a
# reference, so backslashes do not make a reference harmless.
REFERENCE = re.compile(r"\$\\*\{")
# Optimizer options that choose torch's kernels.
KERNELS = ("foreach", "fused", "capturable", "differentiable")


class PlainDtype:
    """A stand-in for ``numpy.dtype`` in a checkpoint; it accepts only dtypes of numbers and booleans.

    numpy does not check a pickled dtype.  A dtype with a hidden object field would make numpy use bytes of the file as
    a pointer.
    """

    def __init__(self, code: str, align: bool = False, copy: bool = False) -> None:
        self.code = code

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        # Read only the byte order from the pickled state: the rest describes structured and object dtypes.
        self.code = f"{state[1]}{self.code}"

    def resolve(self) -> np.dtype[Any]:
        dtype = np.dtype(self.code)
        if dtype.kind not in "biufc":
            raise pickle.UnpicklingError(f"it holds a numpy array of {dtype}; only numbers and booleans are allowed")
        return dtype


class PlainArray(np.ndarray[Any, Any]):
    """A stand-in for ``numpy.ndarray`` in a checkpoint; it checks shape and bytes before numpy uses them."""

    def __new__(cls, *_from_file: object) -> PlainArray:
        return super().__new__(cls, 0)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, data = state
        array = np.frombuffer(data, dtype.resolve()).reshape(shape, order="F" if fortran else "C")
        super().__setstate__(array.__reduce__()[2])  # type: ignore[arg-type]

    def __reduce__(self) -> Any:
        return self.view(np.ndarray).__reduce__()  # save a plain numpy array in new checkpoints


def plain_scalar(dtype: PlainDtype, data: bytes) -> Any:
    """Return one number that a checkpoint contains; this function replaces ``numpy.core.multiarray.scalar``."""
    return np.frombuffer(data, dtype.resolve())[0]


SAFE_GLOBALS: list[Any] = [
    argparse.Namespace,  # a model's options
    *OLD_METERS,  # old checkpoints use two module names for these classes
    *((meter, f"fairseq.meters.{meter.__name__}") for meter in OLD_METERS),
    # This placeholder replaces each tensor when a resumed distributed training sends the state to other ranks.
    distributed_utils._TensorPlaceholder,
    (PlainDtype, "numpy.dtype"),  # meters contain numpy numbers, for example the sums of --eval-bleu
    (PlainArray, "numpy.ndarray"),
    *((PlainArray, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    *((plain_scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
]


@wrap(checkpoint_utils, "load_checkpoint_to_cpu")
def load_checkpoints_safely(load: Any, path: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Name the file in errors about a checkpoint, and refuse ``${...}`` in ``--model-overrides``."""
    for overrides in (*args, *kwargs.values()):
        if found := reference_in(overrides):
            raise ValueError(f"{found}; give the value itself")
    try:
        state: dict[str, Any] = load(path, *args, **kwargs)
    except (pickle.UnpicklingError, ValueError) as error:
        raise pickle.UnpicklingError(
            f"{path} was refused: {error}. No code in the file was run; use another checkpoint."
        ) from None
    except (EOFError, OSError, RuntimeError) as error:
        if str(path) in str(error):
            raise
        reason = f"{str(error) or 'it ends too early'}{undamaged_beside(Path(path))}"
        raise OSError(f"{path} is damaged and cannot be read: {reason}") from None
    except Exception as error:  # a malformed file can raise any error
        reason = f"{type(error).__name__}: {error}"
        if "ARCH_MODEL_REGISTRY[" in str(traceback.extract_tb(error.__traceback__)[-1].line):
            reason += " is an architecture that is not registered; give the --user-dir of its training"
        else:
            reason += "; use another checkpoint"
        raise pickle.UnpicklingError(f"{path} cannot be read as a checkpoint of fairseq: {reason}") from error
    return state


def undamaged_beside(path: Path) -> str:
    """Return advice for an error about a damaged checkpoint: the newest undamaged checkpoint, or a new copy."""
    if (newest := newest_whole_checkpoint(path.parent)) in (None, path):
        return "; copy it again, or use another checkpoint"
    return f"; the newest undamaged checkpoint beside it is {newest}"


@wrap(distributed_utils, "broadcast_object")
def broadcast_plain_configuration(broadcast: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
    """Send a resumed training's configuration to other ranks as dictionaries; torch refuses objects of omegaconf."""
    if isinstance(obj, dict) and OmegaConf.is_config(obj.get("cfg")):
        obj = {**obj, "cfg": OmegaConf.to_container(obj["cfg"], enum_to_str=True)}
    return broadcast(obj, *args, **kwargs)


def contents(value: Any, place: str = "it") -> Iterator[tuple[str, Any]]:
    """Yield a value and all values nested in it, each with its path, such as ``cfg.model.dropout``."""
    yield place, value
    inner: Iterable[tuple[object, Any]] = ()
    if isinstance(value, dict):
        inner = dict.items(value)
    elif isinstance(value, list | tuple | set):
        inner = enumerate(value)
    elif isinstance(value, (argparse.Namespace, *OLD_METERS)):
        inner = vars(value).items()
    for key, part in inner:
        if isinstance(key, str | int):
            # Limit the length of paths such as ``cfg.model.dropout``: the recursion stores one path per level.
            yield from contents(part, f"{place}.{str(key)[:100]}".removeprefix("it.")[-300:])
        else:
            yield from contents((key, part), place)


def reference_in(value: Any) -> str | None:
    """Return an error message for the first reference (``${...}``) in a value, or None if there is no reference."""
    for place, text in contents(value):
        if isinstance(text, str) and REFERENCE.search(text):
            return f"{place}: {text[:100]!r} refers to another value"
    return None


def fault_of(tensor: Tensor) -> str | None:
    """Return the reason to refuse a tensor, or None if the tensor is accepted.

    Methods are called on the class `Tensor`, because a file can replace the methods of an instance.
    """
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_nested or tensor.layout is not torch.strided:
        return "not a plain tensor"
    if tensor.dtype not in NUMBERS or tensor.device.type != "cpu":
        return f"a tensor of {tensor.dtype} on the device {tensor.device}"
    size = Tensor.numel(tensor) * Tensor.element_size(tensor)
    if size > Tensor.untyped_storage(tensor).nbytes():
        return f"a tensor of {size} bytes, more than the file has"
    return None


def check(state: Any) -> None:
    """Refuse a state that is not a checkpoint of fairseq, or that could harm the user who loads it.

    Raises:
        ValueError: a part of the state is malformed; the error names this part.
    """
    if type(state) is not dict or not isinstance(state.get("model"), dict):
        raise ValueError("it has no model parameters")
    for name, value in dict.items(state["model"]):
        if not isinstance(name, str) or not isinstance(value, Tensor):
            shown = repr(name[:100]) if isinstance(name, str) else f"of {type(name).__name__}"
            raise ValueError(f"its parameter {shown} must be a tensor with a string as its name")
    for name, kind in (("cfg", dict), ("args", argparse.Namespace), ("extra_state", dict), ("task_state", dict)):
        part = state.get(name)
        if not isinstance(part, kind | NoneType):
            raise ValueError(f"its {name} must be a {kind.__name__}, got {type(part).__name__}")
        if isinstance(part, dict) and (odd := [key for key in part if not isinstance(key, str)]):
            raise ValueError(f"its {name} must have only strings as keys, got {type(odd[0]).__name__}")
    check_values(state)
    versions = getattr(state["model"], "_metadata", None) or {}
    if not isinstance(versions, dict) or not all(isinstance(each, dict) for each in dict.values(versions)):
        raise ValueError("the version numbers of its model's modules (_metadata) are malformed")
    if found := reference_in({name: state.get(name) for name in ("cfg", "args")}):
        raise ValueError(found)


def check_values(state: dict[str, Any]) -> None:
    """Refuse a state with too many values, with unusual tensors, or with extra attributes of tensors or dictionaries.

    An extra attribute could replace a method, such as ``items`` of a dictionary, and hide values.
    """
    for count, (place, value) in enumerate(contents(state)):
        if count == MOST_VALUES:
            raise ValueError(f"it has more than {MOST_VALUES} values")
        if isinstance(value, Tensor) and (fault := fault_of(value)):
            raise ValueError(f"{place} is {fault}")
        if isinstance(value, dict | Tensor) and (odd := [*{*getattr(value, "__dict__", ())} - {"_metadata"}]):
            raise ValueError(f"{place} has an attribute {odd[0]!r}, which could replace a method and hide values")


class CheckingTorch(ModuleType):
    """A stand-in for torch in fairseq's checkpoint loader; its `load` reads only data, and validates the data."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def load(file: IO[bytes], **kwargs: Any) -> Any:
        """Load and validate a file; errors omit torch's advice to load the file with ``weights_only=False``."""
        if (damage := damage_of(file)) is not None:
            raise OSError(damage)
        file.seek(0)
        try:
            state = torch.load(file, **{**kwargs, "weights_only": True})
        except pickle.UnpicklingError as error:
            reason = str(error.__context__ or error)
            if foreign := re.search(r"GLOBAL (\S+)", reason):
                reason = f"it holds {foreign[1]}, which no checkpoint of a translation model needs"
            raise ValueError(reason) from None
        except RuntimeError as error:
            if "weights_only" not in str(error):
                raise
            kinds = "TorchScript, or a file of torch before 0.1.10"
            raise ValueError(
                f"it is {kinds}; such a file cannot be read as data, so save the model as a state_dict"
            ) from None
        check(state)
        return state


@repair
def validate_contents() -> None:
    """Read data and no code from checkpoints, and validate the data; errors name damaged records and foreign classes.

    fairseq resolves references in a checkpoint, even to environment variables.  torch compares no checksums.  torch
    also accepts a file that declares a tensor as sparse, or as larger than the tensor's data.
    """
    torch.serialization.add_safe_globals(SAFE_GLOBALS)
    checkpoint_utils.torch = CheckingTorch("torch")


def check_optimizer_state(state: Any, parameters: Iterable[Tensor]) -> None:
    """Refuse optimizer moments whose sizes differ from the parameters' sizes; fused kernels do not check sizes.

    Raises:
        ValueError: sizes differ, or the state is malformed.
    """
    advice = "give --reset-optimizer to ignore this state"
    try:
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        # torch itself checks that state and model have the same number of parameters.
        moments = [(state["state"].get(number, {}).items(), each.shape) for number, each in zip(numbers, parameters)]  # noqa: B905
        sizes = [(name, value.shape, whole) for own, whole in moments for name, value in own if torch.is_tensor(value)]
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"the checkpoint's optimizer state is malformed: {error!r}; {advice}") from None
    for name, size, whole in sizes:
        # Adafactor's state has one number for each row and each column of a matrix, and a scalar RMS.
        others = {"step": torch.Size(), "RMS": torch.Size()}
        others |= {"exp_avg_sq_row": whole[:-1], "exp_avg_sq_col": whole[:-2] + whole[-1:]}
        if size != others.get(name, whole):
            found = f"{name} of size {list(size)} for a parameter of size {list(whole)}"
            raise ValueError(f"the checkpoint's optimizer state has {found}; {advice}")


@wrap(FairseqOptimizer, "load_state_dict")
def fit_optimizer_states(load: Any, self: Any, state_dict: Any, optimizer_overrides: Any = None) -> None:
    """Refuse optimizer moments of wrong sizes, and ignore the checkpoint's choice of torch's optimizer kernels."""
    check_optimizer_state(state_dict, self.params)
    own = [{name: group[name] for name in KERNELS if name in group} for group in self.param_groups]
    load(self, state_dict, optimizer_overrides)
    for group, kernels in zip(self.param_groups, own, strict=True):
        for name in KERNELS:
            group.pop(name, None)
        group.update(kernels)
