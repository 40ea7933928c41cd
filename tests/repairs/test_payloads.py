"""fairseq's commands run no code of files or options; without the plugin they would run each payload."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from fairseq.data import FastaDataset
from fairseq.data.audio.data_cfg import S2TDataConfig

from tests.commands import USER_DIR, run
from tests.repairs.payloads import Payload, code

COMMON = ["--user-dir", USER_DIR, "--cpu"]
COMMANDS = {
    "generate": ["--max-tokens", 500, "--path"],
    "interactive": ["--path"],
    "validate": ["--task", "translation", "--max-tokens", 500, "--path"],
    "eval_lm": ["--max-tokens", 500, "--path"],
    "train": ["--arch", "transformer_tiny", "--optimizer", "sgd", "--max-tokens", 500, "--no-save", "--restore-file"],
}


@pytest.fixture(scope="module")
def words(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write binary data for language models."""
    folder = shutil.copytree(data, tmp_path_factory.mktemp("words") / "bin")
    shutil.copy(folder / "dict.src.txt", folder / "dict.txt")
    return folder


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace"


def test_the_payloads_are_real(trace: Path, tmp_path: Path) -> None:
    torch.save(Payload(trace), tmp_path / "evil.pt")
    torch.load(tmp_path / "evil.pt", weights_only=False)
    assert trace.exists()
    trace.unlink()
    eval(code(trace))
    assert trace.exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_unpickles_code(command: str, state, words: Path, trace: Path, tmp_path: Path) -> None:
    torch.save({**state, "extra_state": Payload(trace)}, tmp_path / "evil.pt")
    failed = run(command, words, *COMMON, *COMMANDS[command], tmp_path / "evil.pt", stdin="w1\n", succeeds=False)
    assert "evil.pt was refused: it holds posix.system" in failed.stderr
    assert "weights_only" not in failed.stderr
    assert not trace.exists()


def test_a_criterion_from_a_checkpoint_is_not_evaluated(state, words: Path, trace: Path, tmp_path: Path) -> None:
    ctc = {"_name": "ctc", "zero_infinity": False, "sentence_avg": True, "post_process": "letter"}
    cfg = {**state["cfg"], "criterion": {**ctc, "wer_args": code(trace)}}
    torch.save({**state, "cfg": cfg}, tmp_path / "evil.pt")
    command = [words, *COMMON, *COMMANDS["validate"], tmp_path / "evil.pt"]
    failed = run("validate", *command, succeeds=False, fork=False)  # a user's command runs in the module `__main__`
    assert "ValueError: \"__import__('os')" in failed.stderr
    assert not trace.exists()


@pytest.mark.parametrize("command", ["validate", "eval_lm"])
def test_overrides_of_a_model_are_not_evaluated(command: str, words: Path, trace: Path) -> None:
    more = [*COMMANDS[command], "nowhere.pt", "--model-overrides", code(trace)]
    assert "not a literal" in run(command, words, *COMMON, *more, succeeds=False, fork=False).stderr
    assert not trace.exists()


def test_names_in_a_checkpoint_are_not_imported(state, words: Path, trace: Path, tmp_path: Path) -> None:
    """The ``user_dir``, a hydra ``_target_`` and a script to run after saving exist, and fairseq ignores them."""
    (tmp_path / "evil_plugin").mkdir()
    (tmp_path / "evil_plugin" / "__init__.py").write_text(code(trace))
    target = {"_target_": "os.system", "_args_": [f"touch {trace}"]}
    cfg = {name: {**part, **target} if isinstance(part, dict) else part for name, part in state["cfg"].items()}
    cfg["common"]["user_dir"] = str(tmp_path / "evil_plugin")
    cfg["task"] |= {"post_save_script": f"touch {trace}"}
    torch.save({**state, "cfg": cfg}, tmp_path / "model.pt")
    done = run("generate", words, *COMMON, *COMMANDS["generate"], tmp_path / "model.pt")
    assert "Generate test with beam=5: BLEU4" in done.stdout
    assert not trace.exists()


def test_fairseq_score_reads_text(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(code(trace) + "\n")
    assert "BLEU4 = " in run("score", "--sys", tmp_path / "text", "--ref", tmp_path / "text").stdout
    assert not trace.exists()


def test_file_names_are_no_commands(trace: Path, tmp_path: Path) -> None:
    """The option ``--dataset-impl fasta`` would run a command with the file's name."""
    name = f"$(touch {trace.name})"
    (tmp_path / f"{name}.fasta").write_text(">one\nAB\n>two\nABC\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
        dataset = FastaDataset(name)
        assert [dataset[index] for index in range(len(dataset))] == [(">one", "AB"), (">two", "ABC")]
        assert not trace.exists()
        FastaDataset._build_index.__wrapped__(dataset, name)
    assert trace.exists()


def test_the_configuration_of_audio_is_not_evaluated(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"key: !!python/object/apply:os.system ['touch {trace}']\n")
    with pytest.raises(Exception, match="could not determine a constructor"):
        S2TDataConfig(tmp_path / "config.yaml")
    assert not trace.exists()
