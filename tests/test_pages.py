"""Run the commands of the pages, unchanged and in turn.

The text is invented and small, trainings end after three updates and translations after six words (``miniature``);
everything else is what a reader of the page would run.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest

from fairseq_plugins.cpu.packing import PRECISIONS
from tests.commands import ROOT
from tests.test_documentation import INDENTED, PAGES

NOUNS = {"dog": "Hund", "man": "Mann", "well-known boat": "bekanntes Boot", "horse": "Pferd", "tree": "Baum"}
COMMAND = re.compile(r"( *#.*\n)*(fairseq-|python |examples/|make |pip |torchrun |for |from |import |\w+=\")")


class Step(NamedTuple):
    """A block of a page: its beginning, shell commands before and after it, and a reader's replacements of words.

    A block in Python becomes ``script.py``.
    """

    page: str
    begins: str
    before: str = ""
    words: Mapping[str, str] = MappingProxyType({})
    after: str = ""


PREPARE = "python examples/multi30k/prepare.py TEXT PREPARED --merges 50; ln -s PREPARED/data-bin DATA_BIN"
WALKS = {
    "front page, Python": [
        Step("README.md", "fairseq-plugins own-data", "ln -s TEXT/train.?? .; ln -s train.en new.en"),
        Step("docs/quickstart.md", "fairseq-plugins own-data"),
        Step("docs/python.md", "from fairseq_plugins", after="python script.py"),
        Step("docs/internals.md", "import fairseq_plugins", "ln -s OUT/data-bin DATA_BIN",
             after="mkdir mine; mv script.py mine/__init__.py; fairseq-train DATA_BIN --user-dir mine "
             "--arch convs2s_my_corpus --optimizer adam --lr 1e-3 --max-tokens 500"),
        Step("docs/python.md", "from concurrent", after="python script.py"),
    ],
    "families": [
        Step("docs/command_line.md", "fairseq-train DATA_BIN", PREPARE),
        Step("docs/weighted_transformer.md", "fairseq-train DATA_BIN"),
        Step("docs/conv_encoder.md", "fairseq-train DATA_BIN"),
    ],
    "vocabulary": [
        Step("docs/vocabulary.md", "fairseq-plugins lexicon", f"{PREPARE}; cp PREPARED/train.?? .",
             {"...": "--optimizer adam --max-tokens 500"}),
        Step("docs/vocabulary.md", "fairseq-interactive",
             "ln -s checkpoints/checkpoint_best.pt MODEL; fairseq-preprocess --dataset-impl raw -s en -t de "
             "--srcdict DATA_BIN/dict.en.txt --tgtdict DATA_BIN/dict.de.txt --testpref TEXT/train --destdir RAW"),
        Step("docs/convs2s.md", "fairseq-plugins plot-attention", "ln -s PREPARED/code CODES"),
        Step("docs/weighted_transformer.md", "fairseq-plugins plot-attention"),
        Step("docs/conv_encoder.md", "fairseq-plugins plot-attention"),
    ],
    "whole sentences": [
        Step("examples/sequence_risk/README.md", "fairseq-train",
             f"{PREPARE}; fairseq-train DATA_BIN --user-dir user_dir --arch convs2s_iwslt_de_en --optimizer adam "
             "--max-tokens 500; ln -s checkpoints/checkpoint_best.pt CHECKPOINT",
             {"--clip-norm 1": "--clip-norm 1 --save-interval-updates 1", "--last 2": "--last 2 --updates"}),
        Step("examples/sequence_risk/README.md", "fairseq-hydra-train"),
        Step("examples/sequence_risk/findings.md", "fairseq-generate"),
    ],
    "captions": [
        Step("examples/multi30k/README.md", "python examples/multi30k/prepare.py TEXT out "),
        Step("examples/multi30k/README.md", "fairseq-plugins own-data"),
        Step("examples/multi30k/README.md", "for encoder"),
        Step("examples/multi30k/README.md", "model="),
        Step("examples/multi30k/README.md", "examples/multi30k/vocab_selection.py"),
        Step("examples/multi30k/README.md", "fairseq-preprocess",
             words={"5000": "9", "--replace-unk": "--unkpen -99 --replace-unk"}),  # untrained models output no <unk>
        Step("examples/multi30k/README.md", "python examples/multi30k/prepare.py TEXT out-2000",
             words={"--tokenizer moses": "--tokenizer moses --rates 1 --attention-dropouts 0 --seeds 1 "
                    "--grid-updates 3 -- --max-update 3"}),
    ],
    "documentation": [
        Step("examples/documentation/README.md", "python examples/documentation/split.py",
             "python -c \"import polib; [(file := polib.POFile(), setattr(file, 'metadata', {'Language': 'es'}), "
             "file.extend(polib.POEntry(msgid=f'Dog {n} of {m}.', msgstr=f'Perro {n} de {m}.') for m in range(9)), "
             "file.save(f'{n}.po')) for n in range(200)]\"; mkdir -p python-docs-es; mv *.po python-docs-es"),
        Step("examples/documentation/README.md", "fairseq-train model/data-bin",
             words={"--patience 6": "--patience 6 --save-interval-updates 1", "--last 5": "--last 2 --updates"}),
    ],
    "quickstart": [
        Step("examples/quickstart/README.md", "make demo", "export OUT=$PWD/demo",
             {"make demo ARCH=conv_encoder_tiny": "ARCH=conv_encoder_tiny examples/quickstart/run.sh",
              "make demo VOCAB_SELECTION=1": "VOCAB_SELECTION=1 examples/quickstart/run.sh"}),
        Step("examples/quickstart/README.md", "examples/quickstart/run.sh --log-format",
             words={"--validate-interval-updates 50": "--validate-interval-updates 1 --log-interval 1"}),
    ],
    "Weighted Transformer": [
        Step("examples/weighted_transformer/README.md", "fairseq-hydra-train",
             f"{PREPARE}; mkdir data-bin; ln -s ../PREPARED/data-bin data-bin/wmt14_en_de",
             {"task.data": "common.log_format=json task.data"}),
        Step("examples/weighted_transformer/README.md", "recipe=",
             words={"250000": "250000 --no-save --encoder-layers 1"}),  # full-size models have gigabytes
        Step("examples/weighted_transformer/README.md", "fairseq-plugins plot-branches",
             words={"LOG ...": "outputs/*/*/hydra_train.log"}),
        Step("examples/weighted_transformer/README.md", "fairseq-generate ...",
             words={"generate ...": "generate DATA_BIN --user-dir user_dir --path checkpoints/*/checkpoint_best.pt",
                    "train ...": "train DATA_BIN --user-dir user_dir --arch weighted_transformer_tiny --max-tokens 500 "
                    "--criterion weighted_label_smoothed_cross_entropy --optimizer simplex_adam --no-save"}),
    ],
    "papers, subwords": [
        Step("examples/experiments.md", "fairseq-generate", "examples/wmt14_en_de/run.sh convs2s OUT --smoke",
             {"CHECKPOINT": "OUT/convs2s/seed1/checkpoint_best.pt"}),
    ],
    "papers, words": [
        Step("examples/experiments.md", "fairseq-plugins lexicon",
             "examples/wmt14_en_de/run.sh conv_encoder OUT --smoke; rm -r OUT/data-raw-words",
             {"CHECKPOINT": "OUT/conv_encoder/seed1/checkpoint_best.pt"}),
    ],
    "papers, decoding": [
        Step("examples/conv_encoder/README.md", "model=", "examples/wmt16_en_ro/run.sh conv_encoder OUT --smoke",
             {"offset N": "offset 1", "=W": "=0.2"}),
    ],
}  # fmt: skip
FAST = {"front page, Python"}
NEED_INT8 = {"from concurrent"}  # the last step of the page's walk
NEED_EFLOMAL = {"vocabulary", "captions", "quickstart", "papers, words", "papers, decoding"}

# These blocks, given by their beginnings, are run by other tests.
ELSEWHERE = {
    "what starts the tests, and the demo is the quickstart": ("make setup", "make demo       #"),
    "tests/test_installation.py, from a wheel; for Python 3.10 the Makefile": ("pip install",),
    "tests/test_documentation.py": ("python docs/repairs.py",),
    "tests/test_examples.py": ("python examples/architectures", "python examples/variance",
                               "python examples/multi30k/prepare.py TEXT out-joined"),
    "tests/test_ablations.py": ("python examples/ablations",),
    "tests/test_benchmarks.py": tuple(f"python examples/benchmarks/{name}.py"
                                      for name in ("generation", "sequence_risk", "newstest", "training")),
    "tests/repairs/test_distributed.py": ("torchrun",),
    "tests/serve": ("fairseq-plugins serve",),
    "tests/cli/test_export.py": ("fairseq-plugins import-fconv IN.pt",),
    "tests/cli/test_plots.py": ("fairseq-plugins plot-branches CHECKPOINTS", "fairseq-plugins plot-loss"),
    "tests/test_experiments.py": ("examples/gigaword", "examples/iwslt14_de_en", "examples/wmt",
                                  "python examples/prepare", "fairseq-plugins score --rouge",
                                  "fairseq-plugins tune-length RESULTS"),
}  # fmt: skip


def blocks(page: Path) -> list[str]:
    """Return the commands of a page that are on indented lines."""
    found = (re.sub(r"^    ", "", block, flags=re.MULTILINE) for block in INDENTED.findall(page.read_text("utf-8")))
    return [block for block in found if COMMAND.match(block)]


def test_no_command_is_forgotten() -> None:
    places = [(step.page, step.begins) for steps in WALKS.values() for step in steps]
    for page in PAGES:
        name = str(page.relative_to(ROOT))
        for block in blocks(page):
            here = [begins for where, begins in places if where == name and block.startswith(begins)]
            assert here or block.startswith(sum(ELSEWHERE.values(), ())), f"{name}: {block}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a reader's working directory: the repository's folders, and invented captions that tokenising changes."""
    for name in ("examples", "user_dir"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "TEXT").mkdir()
    generator = random.Random(1)
    for part, size in (("train", 60), ("val", 12), ("test_2016_flickr", 12)):
        rows = [generator.choices(list(NOUNS.items()), k=3) for _ in range(size)]
        for place, end, a, other in ((0, "en", "a", "and a"), (1, "de", "ein", "und ein")):
            texts = ([noun[place] for noun in row] for row in rows)
            lines = (f"{a.title()} {x}, {a} {y}, {other} {z}.\n" for x, y, z in texts)
            (tmp_path / "TEXT" / f"{part}.{end}").write_text("".join(lines))
    return tmp_path


def shell(folder: Path, command: str) -> None:
    """Run a script that stops at its first failing command."""
    packages = f"{ROOT / 'tests' / 'miniature'}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": packages, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"},
        input="A dog.\n",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    lines = [line for line in result.stdout.splitlines() if "{'_name'" not in line]  # without whole configurations
    assert not result.returncode, "\n".join([command, *lines[-60:]])


@pytest.mark.parametrize(
    "walk", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in WALKS]
)
def test_the_commands_run(folder: Path, walk: str) -> None:
    if walk in NEED_EFLOMAL and not Path(sys.executable).with_name("eflomal-align").exists():
        pytest.skip("eflomal is not installed")
    for step in WALKS[walk]:
        if step.begins in NEED_INT8 and not PRECISIONS["int8"][1]():
            pytest.skip("all but the last step has been run: this processor has no int8")
        (block,) = (block for block in blocks(ROOT / step.page) if block.startswith(step.begins))
        for word, meaning in step.words.items():
            assert word in block
            block = block.replace(word, meaning)
        if block.startswith(("from ", "import ")):
            (folder / "script.py").write_text(block)
            block = ""
        shell(folder, f"{step.before}\n{block}\n{step.after}")
