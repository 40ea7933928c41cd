"""Checkpoints that nothing can go on from: the error names the file, and training goes on from another one."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import logging
import re
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fairseq import checkpoint_utils
from fairseq.dataclass.configs import CheckpointConfig
from fairseq.trainer import Trainer

__all__ = [
    "name_checkpoints_that_do_not_fit",
    "name_damaged_checkpoints",
    "pass_over_damaged_checkpoints",
    "refuse_other_words",
]

logger = logging.getLogger(__name__)

PICKLE = b"\x80"  # how files of torch before 1.6 begin, which are no archives and do not show where they end
SAVED_BESIDE_THE_LAST = r"checkpoint(\d+|_\d+_\d+|_best|\.best_.+)\.pt"  # by fairseq, with all that training needs


def is_whole(path: Path) -> bool:
    """Whether the end of the file is there, where an archive has its contents."""
    with path.open("rb") as file:
        return zipfile.is_zipfile(file) or (file.seek(0) == 0 and file.read(1) == PICKLE)


def newest_whole_checkpoint(folder: Path, but: str | None = None) -> Path | None:
    """The one that was written last.

    Args:
        but: the name of a file that does not count: what is fine-tuned is not of the same training.
    """
    other = but and Path(but).resolve()
    saved = (path for path in folder.glob("*.pt") if re.fullmatch(SAVED_BESIDE_THE_LAST, path.name))
    whole = (path for path in saved if path.resolve() != other and is_whole(path))
    return max(whole, key=lambda path: path.stat().st_mtime, default=None)


def does_not_say_which(load: Callable[[str], Any]) -> bool:
    """Probe: whether ``load`` leaves out the name of a file whose end is missing."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "probe.pt")
        path.write_bytes(b"PK\x03\x04")  # an archive's beginning
        try:
            load(str(path))
        except Exception as error:
            return str(path) not in str(error)
    return False


def name_damaged_checkpoints() -> None:
    """fairseq does not say which file has no end."""
    load = checkpoint_utils.load_checkpoint_to_cpu
    if not does_not_say_which(load):
        return

    @functools.wraps(load)
    def load_checkpoint_to_cpu(path: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            return load(path, *args, **kwargs)
        except (EOFError, OSError, RuntimeError) as error:
            if str(path) in str(error):
                raise
            raise OSError(f"{path} is damaged and cannot be read: {error}") from None

    checkpoint_utils.load_checkpoint_to_cpu = load_checkpoint_to_cpu


def looks_for_the_last_only(load: Callable[..., Any]) -> bool:
    """Probe: whether ``load`` asks for ``checkpoint_last.pt`` where that is missing and another one is there."""
    asked = []
    trainer = SimpleNamespace(
        checkpoint_suffix="",
        load_checkpoint=lambda path, *_, **__: asked.append(Path(path).name),
        get_train_iterator=lambda **_: SimpleNamespace(epoch=1),
        lr_step=lambda _: None,
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "checkpoint1.pt").write_bytes(PICKLE)
        load(CheckpointConfig(save_dir=folder), trainer)
    return asked == ["checkpoint_last.pt"]


def pass_over_damaged_checkpoints() -> None:
    """Where ``checkpoint_last.pt`` is damaged, fairseq does not start again, and where it is missing, as it is when the
    disk was full after the first epoch, it starts anew and writes over the others, though good ones stand beside it.

    Training goes on from the newest of these, and says so.
    """
    start = checkpoint_utils.load_checkpoint
    if not looks_for_the_last_only(start):
        return

    @functools.wraps(start)
    def load_checkpoint(cfg: Any, trainer: Any, **passthrough: Any) -> Any:
        last, given = Path(cfg.save_dir, "checkpoint_last.pt"), (cfg.restore_file, cfg.finetune_from_model)
        newest = None
        if cfg.restore_file == last.name and not trainer.checkpoint_suffix and not (last.is_file() and is_whole(last)):
            newest = newest_whole_checkpoint(last.parent, but=cfg.finetune_from_model)
        if newest is None:
            return start(cfg, trainer, **passthrough)
        logger.warning(f"{last} is {'damaged' if last.exists() else 'missing'}; training goes on from {newest}")
        cfg.restore_file, cfg.finetune_from_model = str(newest), None
        try:
            return start(cfg, trainer, **passthrough)
        finally:
            cfg.restore_file, cfg.finetune_from_model = given

    checkpoint_utils.load_checkpoint = load_checkpoint


def name_checkpoints_that_do_not_fit() -> None:
    """With data of another vocabulary, ``fairseq-generate`` and others do not say which model has other sizes, and
    ``fairseq-train`` not what does not fit.

    The probe comes with the error: whether it names the file, and the reason.
    """
    load, resume = checkpoint_utils.load_model_ensemble_and_task, Trainer.load_checkpoint

    @functools.wraps(load)
    def load_model_ensemble_and_task(filenames: Sequence[str], *args: Any, **kwargs: Any) -> Any:
        try:
            return load(filenames, *args, **kwargs)
        except RuntimeError as error:
            if "state_dict" not in str(error) or any(str(name) in str(error) for name in filenames):
                raise
            names = ", ".join(map(str, filenames))
            raise RuntimeError(f"{names}: not of the vocabulary or the architecture asked for. {error}") from None

    @functools.wraps(resume)
    def load_checkpoint(self: Any, filename: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return resume(self, filename, *args, **kwargs)
        except Exception as error:
            reason = " ".join(str(error.__context__).split())
            if "state_dict" not in reason or reason in str(error):
                raise
            raise RuntimeError(
                f"{filename}: not of the vocabulary or the architecture asked for; data for a model that is trained "
                f"already are made with its dictionaries (fairseq-preprocess --srcdict --tgtdict). {reason[:200]}"
            ) from None

    checkpoint_utils.load_model_ensemble_and_task = load_model_ensemble_and_task
    Trainer.load_checkpoint = load_checkpoint


def words(task: Any) -> dict[str, str]:
    """A digest of each dictionary of the task."""
    found = {}
    for name in ("source", "target"):
        with contextlib.suppress(AttributeError, NotImplementedError):  # not every task has both, or any
            symbols = getattr(task, f"{name}_dictionary").symbols
            found[name] = hashlib.sha256("\n".join(symbols).encode()).hexdigest()
    return found


def refuse_other_words() -> None:
    """fairseq resumes with any dictionary of the same size, and trains on as if the words were the same.

    Their digests are saved and compared.  Where the optimizer is reset, as where fine-tuning starts, it is only said.
    """
    save, resume = Trainer.save_checkpoint, Trainer.load_checkpoint
    if "source_dictionary" in inspect.unwrap(save).__code__.co_names:  # the probe: somebody looks at the words
        return

    @functools.wraps(save)
    def save_checkpoint(self: Any, filename: str, extra_state: dict[str, Any]) -> Any:
        return save(self, filename, {**extra_state, "words": words(self.task)})

    @functools.wraps(resume)
    def load_checkpoint(self: Any, filename: str, reset_optimizer: bool = False, *args: Any, **kwargs: Any) -> Any:
        extra_state = resume(self, filename, reset_optimizer, *args, **kwargs)
        saved = (extra_state or {}).get("words", {})
        for name, digest in words(self.task).items():
            others = f"{filename} was trained with other {name} words than those of this data"
            if saved.get(name, digest) == digest:
                continue
            if not reset_optimizer:
                raise ValueError(f"{others}; to train on with these nevertheless, give --reset-optimizer")
            logger.warning(f"{others}: each gets what was learned for the word of its number")
        return extra_state

    Trainer.save_checkpoint, Trainer.load_checkpoint = save_checkpoint, load_checkpoint
