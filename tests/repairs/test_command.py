"""The process of a fairseq command: memory, help and temporary files."""

from __future__ import annotations

import os
import platform
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
from fairseq import options

from tests.commands import QUIET, ROOT, TRAINING, USER_DIR, python, run, started
from tests.conftest import ARCHITECTURES

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


def output(program: str, settings: dict[str, str], command: bool = True, argument: str = "") -> str:
    """Run a program in a new process: a forked one has another heap, and malloc reads its settings at the start."""
    names = ("MALLOC_", "GLIBC_", "ONEDNN_", "DNNL_", "LRU_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    code = f"import fairseq_plugins, sys; sys.argv[0] = {argument!r}; fairseq_plugins.install({command})\n{program}"
    result = started([sys.executable, "-W", "ignore", "-c", code], ROOT, environment | settings)
    assert result.returncode == 0, result.stderr
    return result.stdout


def pages(command: bool = True, argument: str = "", **settings: str) -> list[int]:
    """Return page faults: for a 64 MiB block, medians of seven more such blocks and seven of 32 MiB, and for 256 MiB.

    Medians are needed because a small object occasionally takes the free memory.
    """
    first, *others, larger = map(int, output(_PAGES, settings, command, argument).split())
    return [first, statistics.median_low(others[:7]), statistics.median_low(others[7:]), larger]


@glibc
def test_freed_memory_is_used_again() -> None:
    first, again, smaller, larger = pages()
    assert max(again, smaller) < first / 10
    assert larger > 2 * first  # the process has not had so much memory before


@glibc
@pytest.mark.parametrize(
    "options",
    [
        *({name: "131072"} for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")),
        *({"argument": program} for program in ("/bin/fairseq-train", "/lib/fairseq_cli/train.py")),
        {"command": False},
    ],
)
def test_settings_trainings_and_libraries_return_memory(options: dict[str, Any]) -> None:
    first, again, *_ = pages(**options)
    assert again > first / 2


def test_caches_of_products_are_small_unless_the_environment_sets_them() -> None:
    names = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    program = f"import os; print(*map(os.environ.get, {names}))"
    assert output(program, {}).split() == ["128", "128"]
    assert output(program, dict.fromkeys(names, "9")).split() == ["9", "9"]
    assert output(program, {"DNNL_PRIMITIVE_CACHE_CAPACITY": "9"}).split() == ["None", "128"]


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_shows_the_options_of_the_model(flag: str) -> None:
    """Options of the criterion and task are shown, too; fairseq prints its help before it adds them."""
    chosen = ["--arch", "conv_encoder", "--criterion", "vocab_selection_cross_entropy", "--task", "translation_fast"]
    shown = run("train", "--user-dir", USER_DIR, *chosen, flag).stdout
    for option in ("--pooling-width", "--label-smoothing", "--candidates-per-word", "--max-tokens"):
        assert f"\n  {option}" in shown


def test_only_given_options_override() -> None:
    """``fairseq-validate`` overrides the checkpoint's options by given options, but not by defaults."""
    words = ["data", "--task", "translation", "--path", "model.pt", "--max-tokens", "9"]
    given = options.parse_args_and_arch(options.get_validation_parser(), words, suppress_defaults=True)
    asked = {"data": "data", "task": "translation", "path": "model.pt", "max_tokens": 9}
    assert {name: value for name, value in vars(given).items() if value} == asked


@pytest.mark.parametrize("option", ["--seed", "--risk-hypotheses"])
def test_errors_of_options_are_printed_without_a_traceback(data: Path, option: str) -> None:
    """One error is from the table of refusals, the other is raised by a criterion."""
    words = [data, "--user-dir", USER_DIR, "--arch", ARCHITECTURES[0], "--criterion", "sequence_risk", option, -1]
    failed = run("train", *words, *TRAINING, *QUIET, succeeds=False)
    assert failed.returncode == 1
    assert re.fullmatch(rf"fairseq-train: error: {option}[ :].*\n", failed.stderr)


def test_the_process_of_a_user_prints_no_traceback(data: Path) -> None:
    failed = run("generate", data, "--user-dir", USER_DIR, "--path", "x", "--seed", -1, succeeds=False, fork=False)
    assert failed.returncode == 1
    assert re.search(r"^generate\.py: error: --seed ", failed.stderr, flags=re.MULTILINE)
    assert "Traceback" not in failed.stderr


def test_a_training_that_diverges_names_the_option(data: Path, tmp_path: Path) -> None:
    words = [data, "--user-dir", USER_DIR, "--arch", ARCHITECTURES[0], "--save-dir", tmp_path, "--max-epoch", 1]
    failed = run("train", *words, *TRAINING, *QUIET, "--lr", 1e30, succeeds=False)
    assert failed.returncode == 1
    assert re.search(r"^fairseq-train: error: --lr: .*diverged", failed.stderr, flags=re.MULTILINE)
    assert "Traceback" not in failed.stderr


@pytest.mark.parametrize(
    ("kind", "message", "alone"),
    [
        ("ValueError", "--lr must be 1", True),
        ("ValueError", "--- a bug", False),
        ("ValueError", "-- a bug", False),
        ("FloatingPointError", "AMP: Minimum loss scale reached (0.1).", True),
        ("FloatingPointError", "overflow", False),
    ],
)
def test_errors_of_programs_keep_their_traceback(kind: str, message: str, alone: bool) -> None:
    words = f"import fairseq_cli, fairseq_plugins; fairseq_plugins.install(command=True); raise {kind}({message!r})"
    result = python("-c", words)
    assert ("Traceback" not in result.stderr, message in result.stderr) == (alone, True)
