"""What a checkpoint says of its training, and whether it goes with this one."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fairseq import checkpoint_utils
from fairseq.dataclass.configs import CheckpointConfig
from fairseq.file_io import PathManager
from fairseq.models import ARCH_MODEL_NAME_REGISTRY
from fairseq.trainer import Trainer
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_original_cwd

from fairseq_plugins.common.options import architecture, flag
from fairseq_plugins.common.replaced import replaced
from fairseq_plugins.repairs.precision import loading_masters, restore_loss_scale
from fairseq_plugins.repairs.resuming import fingerprint, lost_patience
from fairseq_plugins.repairs.wrapping import in_place_of

logger = logging.getLogger(__name__)

UNKNOWN = "unknown"  # what a training began with whose checkpoint fairseq wrote without this plugin


def ask_what_was_trained() -> None:
    """One wrapper each of saving and loading: words, patience and the start of a fine-tuning are saved, and checkpoints
    that are missing, or that this training cannot go on from, are refused.

    The probe of words: does saving look at them?  Of parameters, it comes with the error: does it give the reason?
    """
    save, load = Trainer.save_checkpoint, Trainer.load_checkpoint
    compares_words = "source_dictionary" in save.__code__.co_names

    @in_place_of(Trainer, "save_checkpoint")
    def save_checkpoint(self: Any, filename: str, extra_state: dict[str, Any]) -> Any:
        more = {"patience": dict(lost_patience()), "finetuned_from": getattr(self, "finetuned_from", None)}
        more |= {} if compares_words else {"words": words(self.task)}
        return save(self, filename, {**extra_state, **more})

    @in_place_of(Trainer, "load_checkpoint")
    def load_checkpoint(self: Any, filename: str, reset_optimizer: bool = False, *args: Any, **kwargs: Any) -> Any:
        refuse_missing_file(self.cfg.checkpoint, filename)
        try:
            with (
                averages_that_begin_with_the_model() if self.cfg.ema.store_ema else contextlib.nullcontext(),
                loading_masters(self, filename, reset_optimizer),
            ):
                extra_state = load(self, filename, reset_optimizer, *args, **kwargs)
        except Exception as error:
            reason = " ".join(str(error.__context__).split())
            if type(error) is not Exception or error.__context__ is None or reason in str(error):
                raise
            raise RuntimeError(f"{filename}: {misfit(filename, self.cfg.model, reason)}") from None
        if extra_state is not None and not reset_optimizer:
            restore_loss_scale(self.optimizer, extra_state.get("loss_scale"))
        if self._optim_history and not reset_optimizer:
            refuse_lost_optimizer(filename, self._optim_history[-1].get("num_updates", 0), self.get_num_updates())
        if not compares_words:
            refuse_other_words(self.task, filename, extra_state, reset_optimizer)
        start = self.cfg.checkpoint.finetune_from_model
        if filename == start:
            self.finetuned_from = fingerprint(filename)
        elif extra_state is not None:
            self.finetuned_from = extra_state.get("finetuned_from", UNKNOWN)
            if start is not None:
                refuse_another_start(start, filename, self.finetuned_from)
        return extra_state


def refuse_missing_file(options: Any, filename: str) -> None:
    """fairseq begins with random parameters where this file is missing, and overwrites the checkpoints of the folder.

    Only ``checkpoint_last.pt``, the default, need not exist yet.

    Raises:
        ValueError: it is missing; the error says where a file of that name is.
    """
    names = ("finetune_from_model", "continue_once")
    option = next((name for name in names if getattr(options, name, None) == filename), "restore_file")
    default = option == "restore_file" and options.restore_file == CheckpointConfig.restore_file
    if PathManager.isfile(filename) or (default and not os.path.lexists(filename)):
        return
    path = Path(filename)
    started_in = get_original_cwd() if HydraConfig.initialized() else ""  # hydra changes the working directory
    similar = (path, path.name, f"{path}.pt", f"{path.name}.pt", path / "checkpoint_last.pt")
    places = (Path(folder, name) for folder in (options.save_dir, started_in) for name in similar)
    found = next((f"; a checkpoint of that name is {place}" for place in places if place.is_file()), "")
    problem = "is a folder" if path.is_dir() else "does not exist"
    raise ValueError(f"{flag(option)} {filename}: {path.absolute()} {problem}{found}")


def refuse_lost_optimizer(filename: str, saved: int, loaded: int) -> None:
    """fairseq goes on with the epoch of a checkpoint that has no optimizer state, and with a fresh optimizer, a second
    warm-up and updates that are counted from zero.

    Args:
        filename: the checkpoint.
        saved: the updates that made it.
        loaded: the updates that the training counts after loading it.

    Raises:
        ValueError: the checkpoint had no optimizer state.
    """
    if saved != loaded:
        raise ValueError(
            f"--restore-file {filename} has no optimizer state (--no-save-optimizer-state, or an average), and "
            f"training cannot go on from its {saved} updates: to begin a training with its parameters, give "
            f"--finetune-from-model {filename} and another --save-dir; to go on with its epoch and a fresh optimizer, "
            "--reset-optimizer"
        )


@contextlib.contextmanager
def averages_that_begin_with_the_model() -> Iterator[None]:
    """With ``--store-ema`` fairseq cannot load a checkpoint that has no moving average.

    It would begin one with the model's parameters, and looks for them where it has just removed them.
    """
    read = checkpoint_utils.load_checkpoint_to_cpu

    def read_with_average(*args: Any, **kwargs: Any) -> Any:
        state = read(*args, **kwargs)
        state["extra_state"].setdefault("ema", state["model"])
        return state

    with replaced(checkpoint_utils, "load_checkpoint_to_cpu", read_with_average):
        yield


def misfit(filename: str, options: Any, reason: str) -> str:
    """Why a model with these options cannot be loaded from a checkpoint; torch or the model gives a reason."""
    theirs, ours = family(checkpoint_utils.load_checkpoint_to_cpu(filename)["cfg"].model), family(options)
    if theirs != ours:
        return f"it holds a model of the family {theirs}, and --arch asks for one of {ours}"
    if "state_dict" not in reason:
        return reason
    return (
        "not of the vocabulary or the architecture asked for; data for a model that is trained already are made with "
        f"its dictionaries (fairseq-preprocess --srcdict --tgtdict). {reason[:200]}"
    )


def family(options: Any) -> str:
    """As the models of an architecture are called."""
    name = architecture(options)
    return str(ARCH_MODEL_NAME_REGISTRY.get(name, name))


def words(task: Any) -> dict[str, str]:
    """A digest of each dictionary of the task."""
    found = {}
    for name in ("source", "target"):
        with contextlib.suppress(AttributeError, NotImplementedError):  # not every task has both, or any
            symbols = getattr(task, f"{name}_dictionary").symbols
            found[name] = hashlib.sha256("\n".join(symbols).encode()).hexdigest()
    return found


def sides_of_other_words(task: Any, extra_state: Any) -> list[str]:
    """The sides of the task whose dictionaries are not those of a checkpoint; none where it does not say which."""
    saved = extra_state.get("words") if isinstance(extra_state, dict) else None
    if not isinstance(saved, dict):
        return []
    return [side for side, digest in words(task).items() if saved.get(side, digest) != digest]


def refuse_other_words(task: Any, filename: str, extra_state: Any, reset_optimizer: bool) -> None:
    """fairseq resumes with any dictionary of the same size, and trains on as if the words were the same.

    Where the optimizer is reset, as where fine-tuning starts, it is only said.
    """
    for side in sides_of_other_words(task, extra_state):
        others = f"{filename} was trained with other {side} words than those of this data"
        if not reset_optimizer:
            raise ValueError(f"{others}; to train on with these nevertheless, give --reset-optimizer")
        logger.warning(f"{others}: each gets what was learned for the word of its number")


def refuse_another_start(start: str, filename: str, recorded: str | None) -> None:
    """fairseq goes on with what is in the folder without a word, whatever else it is asked to fine-tune.

    Raises:
        ValueError: the training has begun with another checkpoint, or with random parameters (``recorded`` is None);
            where one of the two checkpoints is not known it goes on.
    """
    if recorded is not None and (recorded == UNKNOWN or fingerprint(start) in (recorded, None)):
        return
    begun = "random parameters" if recorded is None else "another checkpoint"
    raise ValueError(
        f"--finetune-from-model {start}: the training in {filename} has begun with {begun}; choose another --save-dir, "
        "or go on with it without this option"
    )
