"""Every recipe of ``examples/`` on a miniature, from the data to the score: the real scripts with ``--smoke``."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf

from tests.commands import ROOT

RECIPES = sorted(path.parent / path.stem for path in (ROOT / "examples").glob("*/*.yaml"))
FAST = {"wmt14_en_de/convs2s"}  # the one that tunes a length penalty
NAMES = [f"{recipe.parent.name}/{recipe.name}" for recipe in RECIPES]


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in NAMES],
)
def test_from_the_data_to_the_score(recipe: str, tmp_path: Path) -> None:
    """With two seeds, hence an ensemble and a mean, and two shards, in one of the examples."""
    if recipe.startswith("gigaword"):
        pytest.importorskip("rouge_score")
    experiment, name = recipe.split("/")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    packages = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": packages, "OMP_NUM_THREADS": "1"}
    if recipe == "wmt16_en_ro/convs2s":
        environment |= {"SEEDS": "1 2", "SHARDS": "2"}
    command = [ROOT / "examples" / experiment / "run.sh", name, tmp_path / "out", "--smoke"]
    result = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert result.returncode == 0, result.stdout[-6000:]
    ensembles = 2 if recipe == "wmt16_en_ro/convs2s" else 1
    if experiment == "gigaword":
        wanted = {"rouge1 recall": 2, "rougeL F1": 2}
    else:
        parts = 2 if name.startswith("weighted") and experiment == "wmt14_en_de" else 1
        wanted = {"sacreBLEU (nrefs:1": parts * ensembles, "tokenised BLEU": 0 if "en_ro" in recipe else parts}
    for text, count in wanted.items():
        assert len(re.findall(rf"^{re.escape(text)}", result.stdout, flags=re.MULTILINE)) == count
    assert (re.search(r"^sacreBLEU .* mean ", result.stdout, flags=re.MULTILINE) is not None) == (ensembles == 2)


def commands(readme: Path) -> dict[str, list[str]]:
    """The plain ``fairseq-train`` of each recipe: the words that follow ``# RECIPE`` in the page."""
    blocks = re.findall(r"^    # (\w+)\n((?:    .*\n)+)", readme.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {name: shlex.split(block.replace("\\\n", " "), comments=True) for name, block in blocks}


@pytest.mark.parametrize("recipe", NAMES)
def test_plain_command_says_what_the_recipe_does(recipe: str, tmp_path: Path) -> None:
    """Each value of the configuration is what fairseq-train makes of the command line."""
    experiment, name = recipe.split("/")
    words = commands(ROOT / "examples" / experiment / "README.md")[name]
    assert words[0] == "fairseq-train"
    parser = options.get_training_parser()
    given = options.parse_args_and_arch(parser, [*words[1:], "--save-dir", str(tmp_path)])
    found = OmegaConf.to_container(convert_namespace_to_omegaconf(given), enum_to_str=True)
    recipe_values: Any = OmegaConf.to_container(OmegaConf.load(ROOT / "examples" / f"{recipe}.yaml"))
    for group in ("distributed_training", "checkpoint"):  # how many GPUs, and where to save; but for early stopping
        recipe_values[group] = {key: value for key, value in recipe_values.get(group, {}).items() if key == "patience"}
    if recipe_values["optimizer"] == {"_name": "nag", "momentum": 0.0}:
        del recipe_values["optimizer"]  # SGD, which cannot be configured with hydra
        assert given.optimizer == "sgd"
        assert given.momentum == 0
    for group, values in recipe_values.items():
        for option, value in values.items():
            if option not in {"user_dir", "data", "log_interval"}:
                assert plain(found[group][option]) == plain(value), f"{group}.{option}"


def plain(value: object) -> object:
    """Numbers as numbers, however they were written."""
    try:
        return float(str(value))
    except ValueError:
        return str(value)
