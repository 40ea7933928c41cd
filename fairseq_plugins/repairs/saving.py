"""Checkpoints are written beside the old ones and take their places whole, or not at all."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.file_io import PathManager

from fairseq_plugins.common.whole_file import beside
from fairseq_plugins.repairs.resuming import SAVED_BESIDE_THE_LAST, is_whole, newest_whole_checkpoint
from fairseq_plugins.repairs.wrapping import in_place_of


def cause(error: BaseException | None) -> BaseException | None:
    """What the system said, where torch covers it up ("unexpected pos 1280 vs 1174")."""
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error


@contextlib.contextmanager
def replacing_checkpoint(path: str) -> Iterator[str]:
    """A file beside ``path`` that takes its place when it is written, and is gone when it could not be.

    Raises:
        OSError: it could not; ``path`` is what it was.
    """
    try:
        with beside(Path(path)) as unfinished:
            yield str(unfinished)
    except Exception as error:
        raise OSError(f"{path} was not written: {cause(error) or error}{what_remains(Path(path))}") from error


def what_remains(path: Path) -> str:
    """With what training would begin, where ``path`` is one of its checkpoints."""
    if not re.fullmatch(rf"checkpoint_last\.pt|{SAVED_BESIDE_THE_LAST}", path.name):
        return ""
    last = path.with_name("checkpoint_last.pt")
    found = last if last.is_file() and is_whole(last) else newest_whole_checkpoint(path.parent)
    if found is None:
        return ". No checkpoint is there yet: started again, training begins anew"
    return f". Started again, without --restore-file, training goes on from {found}"


def save_checkpoints_whole() -> None:
    """On a full disk fairseq appends to the half that it has written, three times, leaves that file there, and ends
    with an error that names neither the file nor the reason.

    There is nothing to probe: a file that is written whole stays the same.
    """
    save = checkpoint_utils.torch_persistent_save

    @in_place_of(checkpoint_utils, "torch_persistent_save")
    def torch_persistent_save(obj: Any, filename: Any, async_write: bool = False) -> None:
        if async_write or not PathManager.supports_rename(filename):
            save(obj, filename, async_write)
            return
        with replacing_checkpoint(filename) as unfinished, open(unfinished, "wb") as file:  # noqa: PTH123  (fairseq has names, not paths)
            torch.save(obj, file)


def copy_checkpoints_whole() -> None:
    """fairseq writes into ``checkpoint_last.pt``: killed meanwhile, it leaves neither the old one nor the new.

    There is nothing to probe: a copy that is renamed may be renamed twice.
    """
    copy = PathManager.copy

    @in_place_of(PathManager, "copy")
    def copy_and_rename(src_path: str, dst_path: str, overwrite: bool = False) -> Any:
        if not (overwrite and PathManager.supports_rename(dst_path)):
            return copy(src_path, dst_path, overwrite)
        with replacing_checkpoint(dst_path) as unfinished:
            return copy(src_path, unfinished, overwrite)
