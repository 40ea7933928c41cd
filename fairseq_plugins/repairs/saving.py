"""Save checkpoints completely and with float32 parameters, and detect damaged checkpoints."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import time
import zipfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import torch
from fairseq import checkpoint_utils
from fairseq.file_io import PathManager
from fairseq.optim import FP16Optimizer
from fairseq.optim.dynamic_loss_scaler import DynamicLossScaler
from fairseq.trainer import Trainer
from torch import Tensor, nn

from fairseq_plugins.common.files import beside
from fairseq_plugins.repairs.wrapping import replace, wrap

logger = logging.getLogger(__name__)

ARCHIVE = b"PK\x03\x04"  # the first bytes of torch's archives
PICKLE = b"\x80"  # the first byte of files that torch before 1.6 saved, which have neither checksums nor an end mark
# Names of checkpoints from which a training can resume if checkpoint_last.pt is damaged or missing.
SAVED_BY_TRAINING = r"checkpoint(\d+|_\d+_\d+|_best|\.best_.+)\.pt"

# The counters of a loss scaler, which fairseq does not save.
COUNTERS = ("_iter", "_last_overflow_iter", "_last_rescale_iter", "_overflows_since_rescale")


def damage_of(file: IO[bytes]) -> str | None:
    """Describe the first damaged record of a checkpoint, or return None; torch does not compare checksums."""
    file.seek(0)
    if file.read(len(ARCHIVE)) != ARCHIVE:
        return None
    place = "its table of records"
    try:
        with zipfile.ZipFile(file) as archive:
            for record in archive.infolist():
                place = f"its record {record.filename!r}"
                with archive.open(record) as content:
                    # 0 means that torch saved the record without a checksum.
                    while record.CRC and content.read(1 << 20):
                        pass
    except Exception as error:  # damaged files raise almost any error
        return f"{place} is corrupt: {error}"
    return None


def is_whole(path: Path) -> bool:
    """Return whether all records of a checkpoint match their checksums; torch before 1.6 saved no checksums."""
    with path.open("rb") as file:
        start = file.read(len(ARCHIVE))
        return (start == ARCHIVE or start[:1] == PICKLE) and damage_of(file) is None


def newest_whole_checkpoint(folder: Path) -> Path | None:
    """Return the newest undamaged checkpoint of a training in this folder."""
    paths = (path for path in folder.glob("*.pt") if re.fullmatch(SAVED_BY_TRAINING, path.name))
    return next(filter(is_whole, sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)), None)


def fingerprint(checkpoint: str) -> str | None:
    """Return a checksum of a checkpoint's contents, independent of its path, or None if the file is missing."""
    try:
        with zipfile.ZipFile(checkpoint) as archive:
            contents = repr(sorted((each.CRC, each.file_size) for each in archive.infolist())).encode()
    except OSError:
        return None
    except zipfile.BadZipFile:  # a file of torch before 1.6
        contents = Path(checkpoint).read_bytes()
    return hashlib.sha256(contents).hexdigest()


@contextlib.contextmanager
def replacing_checkpoint(path: str) -> Iterator[str]:
    """Yield the name of a temporary file; the file replaces ``path`` at the end, or is removed after an error.

    Raises:
        OSError: the file could not be written; ``path`` is unchanged.
    """
    try:
        with beside(Path(path)) as unfinished:
            yield str(unfinished)
    except Exception as error:
        # torch.save hides the system's error behind torch's own error, such as "unexpected pos 1280 vs 1174".
        raise OSError(f"{path} cannot be written: {error.__context__ or error}") from error


@wrap(checkpoint_utils, "torch_persistent_save")
def save_checkpoints_whole(save: Any, obj: Any, filename: Any, async_write: bool = False) -> None:
    """Write a checkpoint to a temporary file, and rename this file when it is complete.

    On a full disk, fairseq leaves a partial file, and fairseq's error names neither the file nor the reason.
    """
    if async_write or not PathManager.supports_rename(filename):
        save(obj, filename, async_write)
        return
    with replacing_checkpoint(filename) as unfinished, open(unfinished, "wb") as file:  # noqa: PTH123  (fairseq has names, not paths)
        torch.save(obj, file)


@wrap(PathManager, "copy")
def copy_checkpoints_whole(copy: Any, src_path: str, dst_path: str, overwrite: bool = False) -> Any:
    """Copy a checkpoint under a temporary name, then rename the copy; fairseq leaves a partial copy if it is killed."""
    if not overwrite or not PathManager.supports_rename(dst_path):
        return copy(src_path, dst_path, overwrite)
    with replacing_checkpoint(dst_path) as unfinished:
        return copy(src_path, unfinished, overwrite)


def masters(optimizer: Any) -> dict[Tensor, Tensor]:
    """Map each parameter in half precision to the float32 tensor that the optimizer updates."""
    if not isinstance(optimizer, FP16Optimizer):
        return {}
    exact = optimizer.fp32_params
    if not optimizer.has_flat_params:
        return dict(zip(optimizer.fp16_params, (each.data for each in exact), strict=True))
    found: dict[Tensor, Tensor] = {}
    for device, vector in exact.items():
        own = [each for each in optimizer.fp16_params if each.device.index == device]
        pieces = vector.data.split([each.numel() for each in own])
        found |= {each: piece.view_as(each) for each, piece in zip(own, pieces, strict=True)}
    return found


def modules(trainer: Trainer) -> dict[str, nn.Module]:
    """Map names of parts of a checkpoint (``model``, ``criterion``) to the modules with the trained parameters."""
    return {"model": trainer.get_model(), "criterion": trainer.get_criterion()}


@wrap(Trainer, "state_dict")
def save_masters(get: Any, self: Any) -> dict[str, Any]:
    """Save the float32 parameters of a training with ``--fp16`` or ``--bf16``, and the counters of its loss scale.

    fairseq saves parameters that were rounded to half precision, but stores them as float32, so this repair changes
    neither the file's layout nor its size.
    """
    state: dict[str, Any] = get(self)
    exact = masters(self.optimizer)
    for part, module in modules(self).items():
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if parameter in exact:
                state[part][name] = exact[parameter]
    if "last_optimizer_state" in state and (counters := scaler_state(self.optimizer)):
        state["extra_state"]["loss_scale"] = counters
    return state


@contextlib.contextmanager
def loading_masters(trainer: Trainer, filename: str, reset_optimizer: bool) -> Iterator[None]:
    """If a checkpoint is loaded in this context, copy its float32 parameters to the optimizer, on each rank.

    Plain fairseq and older versions of the plugin saved rounded parameters; a checkpoint with rounded parameters
    causes a warning.
    """
    read: dict[Tensor, Tensor] = {}

    def keep(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: object) -> None:
        names = ((prefix + name, parameter) for name, parameter in module.named_parameters())
        read.update({parameter: state[name] for name, parameter in names if name in state})

    hooks = [module.register_load_state_dict_pre_hook(keep) for module in modules(trainer).values()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    exact = masters(trainer.optimizer) if read else {}
    loaded = [(parameter, read[parameter]) for parameter in exact if parameter in read]
    for parameter, value in loaded:
        exact[parameter].copy_(value)
    are_rounded = [torch.equal(value, value.to(parameter.dtype).to(value.dtype)) for parameter, value in loaded]
    if loaded and not reset_optimizer and all(are_rounded):
        logger.warning(
            f"{filename} has no float32 parameters: training resumes from rounded parameters, and the result "
            "differs slightly from that of an uninterrupted training"
        )


def scaler_state(optimizer: Any) -> dict[str, Any]:
    """Return the counters by which ``--fp16`` adapts the loss scale; the result is empty if the loss is not scaled."""
    scaler = getattr(optimizer, "scaler", None)
    return {name: vars(scaler)[name] for name in COUNTERS} if isinstance(scaler, DynamicLossScaler) else {}


def restore_loss_scale(optimizer: Any, saved: Any) -> None:
    """Restore the counters of the loss scale."""
    for name in scaler_state(optimizer):
        if isinstance(saved, dict) and type(saved.get(name)) is int:
            setattr(optimizer.scaler, name, saved[name])


def save_every(seconds: float) -> None:
    """Within an epoch, save ``checkpoint_last.pt`` about every ``seconds`` seconds; only own-data calls this function.

    fairseq's ``--save-interval-updates`` counts updates, whose duration is unknown, and validates at each save.
    If several processes train together, this function saves nothing, because all processes must save at the same
    update, and their clocks may differ.
    """
    saved = time.monotonic()

    def validate_and_save(
        validate: Any, cfg: Any, trainer: Any, task: Any, epoch_itr: Any, subsets: Any, end_of_epoch: bool
    ) -> Any:
        nonlocal saved
        result = validate(cfg, trainer, task, epoch_itr, subsets, end_of_epoch)
        is_old = time.monotonic() - saved >= seconds and cfg.distributed_training.distributed_world_size == 1
        if is_old and not end_of_epoch:
            checkpoint_utils.save_checkpoint(cfg.checkpoint, trainer, epoch_itr, None)
        if is_old or end_of_epoch:
            saved = time.monotonic()
        return result

    replace(import_module("fairseq_cli.train"), "validate_and_save", validate_and_save)
