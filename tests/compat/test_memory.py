"""Memory that is given back is kept for what asks next."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from tests.commands import ROOT

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="another C library, whose memory is left alone"
)

_PAGES = """
import resource
import fairseq_plugins
import torch

def pages(megabytes):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(megabytes * 2**18)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

for megabytes in (64, 64, 32, 256, 64):
    print(pages(megabytes))
"""


def pages(**settings: str) -> list[int]:
    """Pages that the system has to bring for blocks of 64, 64, 32, 256 and 64 MiB, one after the other."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-W", "ignore", "-c", _PAGES]
    finished = subprocess.run(command, cwd=ROOT, env=environment | settings, capture_output=True, text=True, check=True)
    return list(map(int, finished.stdout.split()))


def test_the_system_brings_each_page_once() -> None:
    first, again, smaller, larger, last = pages()
    assert max(again, smaller, last) < first / 10
    assert larger > 2 * first  # it has to ask for what it never had


@pytest.mark.parametrize("setting", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"])
def test_settings_of_the_environment_hold(setting: str) -> None:
    first, again, *_ = pages(**{setting: "131072"})
    assert again > first / 2
