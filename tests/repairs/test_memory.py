"""Memory that is given back is kept for what asks next."""

from __future__ import annotations

import ctypes
import os
import platform
import statistics
import subprocess
import sys

import pytest
import torch

from tests.commands import ROOT

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library, whose memory is left alone")

_PAGES = """
import resource
import torch

def pages(megabytes):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(megabytes * 2**18)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

for megabytes in [64] * 8 + [32] * 7 + [256]:
    print(pages(megabytes))
"""


_PRODUCTS = """
import torch

weight = torch.ones(64, 64)
for rows in [*range(1, 201), 200, 1]:
    torch.ops.mkldnn._linear_pointwise(torch.ones(rows, 64), weight, None, "none", [], "")
"""


_DESCRIPTIONS = """
import ctypes
import torch

class Info(ctypes.Structure):
    _fields_ = [(f"field{number}", ctypes.c_size_t) for number in range(10)]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Info
weight = torch.ones(256, 256)
for rows in range(1, 513):
    torch.ops.mkldnn._linear_pointwise(torch.ones(rows, 256), weight, None, "none", [], "")
    if rows in (256, 512):
        print(mallinfo().field7)
"""


def output(program: str, settings: dict[str, str], command: bool = True, argument: str = "") -> str:
    names = ("MALLOC_", "GLIBC_", "ONEDNN_", "DNNL_", "LRU_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    code = (
        f"import sys; sys.argv[0] = {argument!r}\nimport fairseq_plugins; fairseq_plugins.install({command})\n{program}"
    )
    words = [sys.executable, "-W", "ignore", "-c", code]
    environment |= settings
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


def pages(command: bool = True, argument: str = "", **settings: str) -> list[int]:
    """Pages that the system has to bring: for a first block of 64 MiB; in the median of seven more, and of seven of 32
    MiB, since now and then something small takes the place that was left; for one of 256 MiB.
    """
    first, *others, larger = map(int, output(_PAGES, settings, command, argument).split())
    return [first, statistics.median_low(others[:7]), statistics.median_low(others[7:]), larger]


@glibc
def test_the_system_brings_each_page_once() -> None:
    first, again, smaller, larger = pages()
    assert max(again, smaller) < first / 10
    assert larger > 2 * first  # it has to ask for what it never had


@glibc
@pytest.mark.parametrize("setting", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_"])
def test_settings_of_the_environment_hold(setting: str) -> None:
    first, again, *_ = pages(**{setting: "131072"})
    assert again > first / 2


@glibc
@pytest.mark.parametrize("argument", ["/bin/fairseq-train", "/lib/fairseq_cli/train.py"])
def test_a_training_leaves_memory_alone(argument: str) -> None:
    first, again, *_ = pages(argument=argument)
    assert again > first / 2


@glibc
def test_a_library_leaves_memory_alone() -> None:
    first, again, *_ = pages(False)
    assert again > first / 2


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="a torch without oneDNN")
@pytest.mark.parametrize(
    ("settings", "made"),
    [({}, 201), *(({f"{name}_PRIMITIVE_CACHE_CAPACITY": "1024"}, 200) for name in ("ONEDNN", "DNNL"))],
)
def test_old_shapes_of_products_are_forgotten(settings: dict[str, str], made: int) -> None:
    """Of 200 shapes the last is there when it comes again, and the first only where the environment wants it."""
    lines = output(_PRODUCTS, {"ONEDNN_VERBOSE": "2", **settings}).splitlines()
    assert sum("create:cache_miss" in line and "64oc64" in line for line in lines) == made


@glibc
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="a torch without oneDNN")
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="a glibc before 2.33")
def test_new_shapes_of_products_take_no_more_memory() -> None:
    """256 more shapes, after as many: only where the environment wants it, all are kept."""
    few, all_kept = (
        int(after) - int(before)
        for settings in ({}, {"LRU_CACHE_CAPACITY": "1024"})
        for before, after in [output(_DESCRIPTIONS, settings).split()]
    )
    assert abs(few) < all_kept / 4
