"""What a process does with memory that it no longer needs: a command's, for a library leaves that to its user.

glibc gives each block of 32 MB or more, and what is free at the end of its heap, back to the system at once.  A model
asks for such blocks at each step anew, and each time the system clears every page of them.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h
_SETTINGS = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"}


def keep_memory() -> None:
    """For a process that trains or translates, and does nothing else."""
    _keep_freed_memory()
    _keep_few_products()


def _keep_freed_memory() -> None:
    """Keep it for whatever asks next, but not in a training.

    Blocks of many sizes then share one heap, with gaps between them: a training would take 1.7 times as much memory.
    Where the C library is another one, or the environment has such settings of its own, all stays as it is.
    """
    trains = Path(sys.argv[0]).stem.endswith("train")  # fairseq-train, fairseq-hydra-train, fairseq_cli/train.py
    if trains or _SETTINGS & os.environ.keys():
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, -1)


def _keep_few_products() -> None:
    """Keep the last 128 shapes of products, a quarter of a megabyte and more for each.

    oneDNN keeps 1024 of them, and ideep, through which torch calls it, 1024 descriptions of its own.  Batches of
    training hardly ever have the same number of tokens twice, and neither do lines to translate.
    """
    if not {"ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY"} & os.environ.keys():
        os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "128"
    os.environ.setdefault("LRU_CACHE_CAPACITY", "128")
