"""Every recipe of ``examples/`` on small data, from the data to the score: the real scripts with ``--smoke``."""

from __future__ import annotations

import gzip
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
FAST = "wmt14_en_de/convs2s"  # this example tunes a length penalty
WORDS = "wmt16_en_ro/convs2s-words"
NAMES = [f"{recipe.parent.name}/{recipe.name}" for recipe in RECIPES]


def run(experiment: str, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    packages = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": packages, "OMP_NUM_THREADS": "1", **variables}
    command = [ROOT / "examples" / experiment / "run.sh", *map(str, arguments)]
    outputs = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(command, cwd=ROOT, env=environment, text=True, check=False, **outputs)


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(name, marks=[] if name == FAST else [pytest.mark.slow]) for name in [*NAMES, WORDS]],
)
def test_from_the_data_to_the_score(recipe: str, tmp_path: Path) -> None:
    """One of the examples has two seeds, so that an ensemble, a mean and two shards are tested."""
    experiment, name = recipe.split("/")
    variables = {"NAME": "variant"} if recipe == FAST else {}
    more = tmp_path / "out" / "orig" / "sumdata" / "DUC2004" / "task1_ref1.txt.gz"
    if experiment == "gigaword":  # this example has more references, invented here
        pytest.importorskip("rouge_score")
        more.parent.mkdir(parents=True)
        more.write_bytes(gzip.compress(b"one two\n" * 6))
        variables["ORIG"] = str(tmp_path / "none")
    if recipe == WORDS:  # these GPUs do not exist, so the CPU is used
        variables = {"WORDS": "1", "SEEDS": "1 2", "SHARDS": "2", "CUDA_VISIBLE_DEVICES": "98,99"}
    result = run(experiment, name.removesuffix("-words"), tmp_path / "out", "--smoke", **variables)
    assert result.returncode == 0, result.stdout[-6000:]
    assert (tmp_path / "out" / variables.get("NAME", name) / "seed1" / "checkpoint_last.pt").exists()
    assert (f" {more}" in result.stdout) == more.exists()
    shown = re.findall(r"^\$ (?:env CUDA_VISIBLE_DEVICES=(\d+) )?(fairseq-\S+) (\S+)", result.stdout, re.MULTILINE)
    order = [tool if command == "fairseq-plugins" else command for _, command, tool in shown]
    assert "lexicon" not in order or order.index("lexicon") < order.index("fairseq-hydra-train")
    if recipe == WORDS:
        devices = [device for device, command, _ in shown if command == "fairseq-generate"]
        assert sorted(devices) == ["98"] * 3 + ["99"] * 3  # two seeds and their ensemble
    if recipe == FAST:  # the table and the best penalty
        (best,) = re.findall(r"^best options.*: (--lenpen \S+)$", result.stdout, re.MULTILINE)
        assert f"--tokenizer moses --source-lang en --target-lang de {best}\n" in result.stdout
    ensembles = 2 if recipe == WORDS else 1
    if experiment == "gigaword":
        wanted = {"rouge1 recall": 2, "rougeL F1": 2}
    else:
        parts = 2 if name.startswith("weighted") and experiment == "wmt14_en_de" else 1
        wanted = {"sacreBLEU (nrefs:1": parts * ensembles, "tokenised BLEU": 0 if "en_ro" in recipe else parts}
    for text, count in wanted.items():
        assert len(re.findall(rf"^{re.escape(text)}", result.stdout, flags=re.MULTILINE)) == count
    assert (re.search(r"^sacreBLEU .* mean ", result.stdout, flags=re.MULTILINE) is not None) == (ensembles == 2)


def test_a_wrong_call_prints_the_usage_and_begins_nothing(tmp_path: Path) -> None:
    """If a mistyped --smoke were accepted, a real experiment would begin."""
    for arguments in (["convs2s", "--smoke", tmp_path / "out"], ["convs2s"], ["nothing", tmp_path / "out"]):
        result = run("wmt16_en_ro", *arguments)
        assert result.returncode == 2
        assert "conv_encoder conv_encoder_bilstm convs2s\n" in result.stdout
    for word in ("--smoke", "--smok"):
        result = run("wmt16_en_ro", "convs2s", tmp_path / "out", "model._name=convs2s_tiny", word)
        assert result.returncode == 2
        assert result.stdout.startswith(word)
    assert list(tmp_path.iterdir()) == []


def commands(readme: Path) -> dict[str, list[str]]:
    """Return the plain ``fairseq-train`` command of each recipe: the words that follow ``# RECIPE`` on the page."""
    blocks = re.findall(r"^    # (\w+)\n((?:    .*\n)+)", readme.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {name: shlex.split(block.replace("\\\n", " "), comments=True) for name, block in blocks}


@pytest.mark.parametrize("recipe", NAMES)
def test_the_plain_command_equals_the_recipe(recipe: str) -> None:
    """fairseq-train parses the command line to the same value for each option of the configuration."""
    experiment, name = recipe.split("/")
    words = commands(ROOT / "examples" / experiment / "README.md")[name]
    assert words[0] == "fairseq-train"
    parser = options.get_training_parser()
    given = options.parse_args_and_arch(parser, words[1:])
    found = OmegaConf.to_container(convert_namespace_to_omegaconf(given), enum_to_str=True)
    recipe_values: Any = OmegaConf.to_container(OmegaConf.load(ROOT / "examples" / f"{recipe}.yaml"))
    recipe_values.pop("distributed_training", None)  # the number of GPUs
    if recipe_values["optimizer"] == {"_name": "nag", "momentum": 0.0}:
        del recipe_values["optimizer"]  # SGD has no hydra configuration
        assert given.optimizer == "sgd"
        assert given.momentum == 0
    for group, values in recipe_values.items():
        for option, value in values.items():
            if option not in {"user_dir", "data", "log_interval"}:
                assert plain(found[group][option]) == plain(value), f"{group}.{option}"


def plain(value: object) -> object:
    """Return numbers as numbers, without regard to their notation."""
    try:
        return float(str(value))
    except ValueError:
        return str(value)
