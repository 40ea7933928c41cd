"""Options of a command line or a checkpoint, read by fairseq with the plugin."""

from __future__ import annotations

import argparse
import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import fairseq
import fairseq_cli
import pytest
from fairseq import options, utils
from fairseq.data import Dictionary, encoders
from fairseq.data.audio.raw_audio_dataset import RawAudioDataset
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models.fconv import FConvModel

from fairseq_plugins.common.literal import literal
from fairseq_plugins.repairs.options import read_literals
from tests.commands import ROOT, USER_DIR, run
from tests.repairs.payloads import code


@pytest.mark.parametrize(
    "text",
    ["[(512, 3)] * 2 + [(1024, 3, 1)]", "0.25", "1,2", "True", "[True] * 2", "'a'", "-1", "((1, 2),) * 2 + ((3, 4),)"],
)
def test_options_are_read_as_literals(text: str) -> None:
    assert literal(text) == eval(text)


@pytest.mark.parametrize(
    ("largest", "larger"),
    [
        ("[0] * 1000", "[0] * 1001"),
        ("[[0] * 1000] * 9", "[[0] * 1000] * 10"),
        ("[0] * 999 + [1]", "[0] * 999 + [1, 2]"),
    ],
)
def test_literals_have_so_many_elements(largest: str, larger: str) -> None:
    """Also those inside others; beyond, a few letters could ask for gigabytes."""
    assert literal(largest) == eval(largest)
    with pytest.raises(ValueError, match="not a literal"):
        literal(larger)


def evaluating_modules() -> Iterator[str]:
    """The modules of the installed fairseq that call ``eval`` or ``exec``."""
    for package in (fairseq, fairseq_cli):
        root = Path(package.__file__).parent
        for path in sorted(root.rglob("*.py")):
            inside = path.relative_to(root.parent).with_suffix("")
            if inside.parts[:2] == ("fairseq", "examples"):
                continue  # programs of their own, which import each other as `examples`
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
                    yield ".".join(inside.parts)
                    break


_LOOK_AT_MODULES = """
import importlib, sys
half = len(sys.argv) // 2
def load(names):
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            print(f"{name} is not there: {error}", file=sys.stderr)
load(sys.argv[1:half])
import fairseq_plugins
fairseq_plugins.install()
from fairseq_plugins.repairs.options import literal, refuse
load(sys.argv[half:])
for name in sys.argv[1:]:
    if name in sys.modules:
        assert eval("eval, exec", vars(sys.modules[name])) == (literal, refuse), name
        print(name)
"""


def test_every_module_reads_literals_whenever_it_is_loaded() -> None:
    """Half of them are loaded before the plugin, where fairseq has not loaded them already, and half after it."""
    names = list(evaluating_modules())
    assert {"fairseq.criterions.ctc", "fairseq.data.audio.raw_audio_dataset", "fairseq_cli.validate"} <= set(names)
    command = [sys.executable, "-W", "ignore", "-c", _LOOK_AT_MODULES, *names[::2], *names[1::2]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    missing = {line.partition(" ")[0] for line in done.stderr.splitlines() if " is not there: " in line}
    assert {*done.stdout.split(), *missing} == set(names)
    assert len(missing) <= 2


def feature_extractor(spec: str) -> object:
    """What the audio data sets make of the one that a configuration names; fairseq 0.12.2 has other names for it."""
    if "feature_encoder_spec" in inspect.signature(RawAudioDataset).parameters:
        return RawAudioDataset(16000, compute_mask=True, feature_encoder_spec=spec).feature_encoder_spec
    options = {"compute_mask_indices": True, "encoder_embed_dim": 8, "conv_feature_layers": spec}
    return RawAudioDataset(16000, **options)._conv_feature_layers


def test_the_feature_extractor_of_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    """The audio data sets get it from the configuration that a checkpoint brings along."""
    with pytest.raises(ValueError, match="not a literal"):
        feature_extractor(code(tmp_path / "trace"))
    assert not (tmp_path / "trace").exists()
    assert feature_extractor("[(8, 3, 2)] * 2") == [(8, 3, 2)] * 2


def test_a_module_with_an_eval_of_its_own_keeps_it() -> None:
    """As a later fairseq may have one that runs nothing."""
    module = ModuleType("safe")
    module.eval = ast.literal_eval  # type: ignore[attr-defined]
    read_literals(module)
    assert module.eval is ast.literal_eval
    with pytest.raises(ValueError, match="not run"):
        module.exec("1")


def test_options_of_a_checkpoint_are_not_run(tmp_path: Path) -> None:
    text = f"{code(tmp_path / 'trace')} or [(8, 3)]"
    for read in (utils.eval_bool, utils.eval_str_list, utils.eval_str_dict, literal):
        with pytest.raises(ValueError, match="not a literal"):
            read(text)
    task = SimpleNamespace(source_dictionary=Dictionary(), target_dictionary=Dictionary())
    options = {"encoder_embed_dim": 8, "decoder_embed_dim": 8, "decoder_out_embed_dim": 8, "decoder_layers": "[(8, 3)]"}
    options |= {"max_source_positions": 9, "max_target_positions": 9}
    with pytest.raises(ValueError, match="not a literal"):
        FConvModel.build_model(argparse.Namespace(encoder_layers=text, **options), task)
    assert not (tmp_path / "trace").exists()
    model = FConvModel.build_model(argparse.Namespace(encoder_layers="[(8, 3)] * 2", **options), task)
    assert len(model.encoder.convolutions) == 2


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_shows_the_options_of_the_model(flag: str) -> None:
    """And of the criterion and the task; fairseq answers before it knows them."""
    chosen = ["--arch", "conv_encoder", "--criterion", "vocab_selection_cross_entropy", "--task", "translation_fast"]
    shown = run("train", "--user-dir", USER_DIR, *chosen, flag).stdout
    for option in ("--pooling-width", "--label-smoothing", "--candidates-per-word", "--max-tokens"):
        assert f"\n  {option}" in shown


def test_options_that_were_given_alone() -> None:
    """``fairseq-validate`` takes these, and no defaults, for those of a checkpoint."""
    words = ["data", "--task", "translation", "--path", "model.pt", "--max-tokens", "9"]
    given = options.parse_args_and_arch(options.get_validation_parser(), words, suppress_defaults=True)
    asked = {"data": "data", "task": "translation", "path": "model.pt", "max_tokens": 9}
    assert {name: value for name, value in vars(given).items() if value} == asked


@pytest.mark.parametrize("option", ["--bpe characters", "--bpe bytes"])
def test_parts_without_options_are_configured(option: str) -> None:
    parser = options.get_generation_parser()
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, ["data", *option.split()]))
    part = encoders.build_bpe(cfg.bpe)
    assert part.decode(part.encode("a b")) == "a b"


@pytest.mark.parametrize("header", ["", "3 2\n"])
def test_embeddings_are_read_with_and_without_a_header(tmp_path: Path, header: str) -> None:
    (tmp_path / "words").write_text(header + "a 1 2\n7 3 4\n8 5 6\n")
    vectors = utils.parse_embedding(str(tmp_path / "words"))
    assert {word: vector.tolist() for word, vector in vectors.items()} == {"a": [1, 2], "7": [3, 4], "8": [5, 6]}
