"""Checkpoints hold data and never code, and reach every rank of a resume.

They are read with torch's restricted unpickler, which builds nothing but what is on its list.  Added to the list is
what fairseq's checkpoints hold, in a form that can neither run code nor corrupt memory, whatever the file says.
"""

from __future__ import annotations

import argparse
import functools
import io
import os
import pickle
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq import checkpoint_utils
from fairseq.distributed import utils as distributed_utils
from omegaconf import OmegaConf

from fairseq_plugins.repairs.contents import OLD_METERS, load_from_memory, reference_in
from fairseq_plugins.repairs.resuming import newest_whole_checkpoint
from fairseq_plugins.repairs.wrapping import in_place_of


class PlainDtype:
    """Stands in for ``numpy.dtype`` in a file: numbers and booleans only.

    numpy believes a pickled dtype: one that hides an object field makes it follow the file's bytes as a pointer.
    """

    def __init__(self, code: str, align: bool = False, copy: bool = False) -> None:
        self.code = code

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.code = f"{state[1]}{self.code}"  # the byte order; the rest of the state describes structures and objects

    def resolve(self) -> np.dtype[Any]:
        dtype = np.dtype(self.code)
        if dtype.kind not in "biufc":
            raise pickle.UnpicklingError(f"it holds a numpy array of {dtype}, and only numbers and booleans are read")
        return dtype


class PlainArray(np.ndarray[Any, Any]):
    """Stands in for ``numpy.ndarray`` in a file: numpy's own, but shape and bytes are checked before they are used."""

    def __new__(cls, *_from_file: object) -> PlainArray:
        return super().__new__(cls, 0)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, data = state
        array = np.frombuffer(data, dtype.resolve()).reshape(shape, order="F" if fortran else "C")
        super().__setstate__(array.__reduce__()[2])  # type: ignore[arg-type]

    def __reduce__(self) -> Any:
        return self.view(np.ndarray).__reduce__()  # what was read is written as numpy's own again


def plain_scalar(dtype: PlainDtype, data: bytes) -> Any:
    """Stands in for ``numpy.core.multiarray.scalar`` in a file."""
    return np.frombuffer(data, dtype.resolve())[0]


SAFE_GLOBALS: list[Any] = [
    argparse.Namespace,  # a model's options
    *OLD_METERS,  # saved under another name too
    *((meter, f"fairseq.meters.{meter.__name__}") for meter in OLD_METERS),
    distributed_utils._TensorPlaceholder,  # a distributed resume sends the state without its tensors first
    (PlainDtype, "numpy.dtype"),  # sums in the meters, as those of --eval-bleu
    (PlainArray, "numpy.ndarray"),
    *((PlainArray, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    *((plain_scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
]


def refuses(load: Callable[[Any], Any], value: object) -> bool:
    """Probe: whether ``load`` refuses a value that is not on torch's list."""
    try:
        load(value)
    except pickle.UnpicklingError:
        return True
    except (TypeError, ValueError, RuntimeError):  # read, and no checkpoint; or torch is to check and not to check
        pass
    return False


def load_by_torch(value: object) -> Any:
    """For probes: what torch makes of a saved value."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def undamaged_beside(path: Path) -> str:
    """Advice for an error about a damaged checkpoint of a training."""
    newest = newest_whole_checkpoint(path.parent) if path.parent.is_dir() else None
    return "" if newest in (None, path) else f"; the newest undamaged checkpoint beside it is {newest}"


def load_checkpoints_safely() -> None:
    """torch refuses every checkpoint of fairseq, and advises to switch its check off; later fairseq has done so.

    The classes that checkpoints hold are allowed, and an error names any other. A fairseq that switches the check off
    gets it back, at each of its ``torch.load``, by torch's own switch for a process and its children. If the probe
    still finds that files are not checked, no checkpoint is loaded.
    """
    load = checkpoint_utils.load_checkpoint_to_cpu
    load_value = functools.partial(load_from_memory, load)
    if not refuses(load_value, print):
        os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    files_are_checked = refuses(load_value, print)
    torch.serialization.add_safe_globals(SAFE_GLOBALS)

    @in_place_of(checkpoint_utils, "load_checkpoint_to_cpu")
    def load_checkpoint_to_cpu(path: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if not files_are_checked:
            raise pickle.UnpicklingError(
                f"{path} was not loaded: any code that it carries would be run. "
                "Use torch 2.6 or later, and do not set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD."
            )
        if found := reference_in((args, kwargs)):  # overrides
            raise ValueError(found)
        try:
            return load(path, *args, **kwargs)
        except (pickle.UnpicklingError, ValueError) as error:
            # The reason before torch adds its advice.
            reason = str(error if isinstance(error, ValueError) else error.__context__ or error)
            if foreign := re.search(r"GLOBAL (\S+)", reason):
                reason = f"it holds {foreign[1]}, which no checkpoint of fairseq needs"
            raise pickle.UnpicklingError(f"{path} was refused: {reason}. Nothing that it carries was run.") from None
        except (EOFError, OSError, RuntimeError) as error:  # fairseq does not say which file has no end
            if str(path) in str(error):
                raise
            reason = f"{str(error) or 'it ends too early'}{undamaged_beside(Path(path))}"
            raise OSError(f"{path} is damaged and cannot be read: {reason}") from None
        except Exception as error:  # a file can cause any
            reason = f"{type(error).__name__}: {error}"
            if "ARCH_MODEL_REGISTRY[" in str(traceback.extract_tb(error.__traceback__)[-1].line):
                reason += " is an architecture that is not registered; give the --user-dir of its training"
            raise pickle.UnpicklingError(f"{path} cannot be read as a checkpoint of fairseq: {reason}") from error


def broadcast_plain_configuration() -> None:
    """In a distributed resume, rank 0 sends the configuration as omegaconf objects, which the other ranks refuse.

    It is sent as it stood in the file, as plain dictionaries.
    """
    if not refuses(load_by_torch, OmegaConf.create()):
        return
    broadcast = distributed_utils.broadcast_object

    @in_place_of(distributed_utils, "broadcast_object")
    def broadcast_object(obj: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(obj, dict) and OmegaConf.is_config(obj.get("cfg")):
            obj = {**obj, "cfg": OmegaConf.to_container(obj["cfg"], enum_to_str=True)}
        return broadcast(obj, *args, **kwargs)
