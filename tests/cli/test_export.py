"""``fairseq-plugins export`` writes a folder that translates like ``fairseq-interactive``."""

from __future__ import annotations

import shlex
import shutil
import signal
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest
import torch
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from fairseq.tasks.translation_multi_simple_epoch import TranslationMultiSimpleEpochTask

from fairseq_plugins.cli.export import about_subwords
from tests.cli.conftest import refused, tool
from tests.commands import MAIN, USER_DIR, full_disk, python, run, save_model
from tests.conftest import enliven, random_model

TEXT = "w1 w2 w3\nw4\nw19 w0 w7 w7\nnever seen\n"


def checkpoint(data: Path, path: Path, architecture: str) -> Path:
    task = TranslationTask.setup_task(TranslationConfig(data=str(data), source_lang="src", target_lang="tgt"))
    options = {"max_source_positions": 32, "max_target_positions": 32, "source_lang": "src", "target_lang": "tgt"}
    options |= {"data": str(data), "criterion": "cross_entropy"}
    args, model = random_model(architecture, task, **options, task="translation")
    if architecture != "fconv_iwslt_de_en":
        enliven(model)
    return save_model(model, args, path)


def export(*words: object) -> None:
    tool("export", *words)


def translate(folder: Path, *words: object) -> list[str]:
    command = [sys.executable, "-I", str(folder / "translate.py"), "--threads", "1", *map(str, words)]
    result = subprocess.run(command, input=TEXT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def interactive(data: Path, path: Path, *words: object) -> list[str]:
    command = [data, "--user-dir", USER_DIR, "--path", path, "--task", "translation_fast", "-s", "src", "-t", "tgt"]
    text = path.with_name("text")
    text.write_text(TEXT)
    result = run("interactive", *command, "--buffer-size", 9, "--max-tokens", 2000, "--input", text, *words)
    text.unlink()
    return [line.split("\t", 2)[2] for line in result.stdout.splitlines() if line.startswith("D-")]


def test_translates_as_fairseq_interactive(data, architecture, tmp_path, capsys) -> None:
    path, out = checkpoint(data, tmp_path / "model.pt", architecture), tmp_path / "deep" / "an out"
    export(path, out, "--data", data)
    program = shlex.quote(str(out / "translate.py"))
    assert program in capsys.readouterr().out
    for words in (["--beam", 4, "--max-len-b", 9], ["--beam", 1, "--lenpen", 0.5, "--min-len", 4, "--max-len-b", 7]):
        assert translate(out, *words) == interactive(data, path, *words)
    assert "pip install numpy onnxruntime\n" in (out / "README.md").read_text()


def test_candidates_and_unknown_words(data: Path, tmp_path: Path) -> None:
    path, lexicon = checkpoint(data, tmp_path / "model.pt", "convs2s_tiny"), tmp_path / "lexicon"
    lexicon.mkdir()
    (lexicon / "candidates.txt").write_text("".join(f"w{n} w{(n + 1) % 20} 0.5\n" for n in range(20)))
    (lexicon / "frequent.txt").write_text("".join(f"w{n} 9\n" for n in range(20)))
    (lexicon / "dictionary.txt").write_bytes("\ufeffnever translated\n".encode())
    options = ["--candidates", lexicon, "--frequent-candidates", 8]
    export(path, tmp_path / "out", "--data", data, *options)
    words = ["--beam", 3, "--max-len-b", 9]
    found = translate(tmp_path / "out", *words)
    assert found == interactive(data, path, *options, *words)
    assert found != interactive(data, path, *words)
    words += ["--unkpen", -9, "--replace-unk", lexicon / "dictionary.txt"]
    assert "translated" in " ".join(translate(tmp_path / "out", *words))
    assert translate(tmp_path / "out", *words) == interactive(data, path, *options, *words)
    (lexicon / "dictionary.txt").write_text("\n")
    assert "never" in " ".join(translate(tmp_path / "out", *words))
    (lexicon / "dictionary.txt").write_text("never translated\n\nnever translated at all\n")
    with pytest.raises(AssertionError, match=r"dictionary\.txt: line 3"):
        translate(tmp_path / "out", *words)


def test_imported_fconv(data: Path, tmp_path: Path) -> None:
    path = checkpoint(data, tmp_path / "fconv.pt", "fconv_iwslt_de_en")
    tool("import-fconv", path, tmp_path / "model.pt")
    export(tmp_path / "model.pt", tmp_path / "out", "--data", data)
    words = ["--beam", 3, "--max-len-b", 9]
    assert translate(tmp_path / "out", *words) == interactive(data, tmp_path / "model.pt", *words)
    assert "FConvModel" in refused("export", path, tmp_path / "other", "--data", data)


@pytest.mark.parametrize(
    ("word", "options", "named"),
    [
        ("w1", [], []),
        ("w1@@", [], ["--bpe-codes"]),
        ("\u2581w1", [], ["--sentencepiece-model"]),
        ("w1@@", ["--bpe-codes"], []),
        ("w1", ["--bpe-codes"], ["--bpe-codes"]),
    ],
)
def test_units_that_codes_do_not_make_are_reported(word, options, named, data, tmp_path, capsys) -> None:
    path = checkpoint(data, tmp_path / "model.pt", "convs2s_tiny")
    (tmp_path / "codes").write_text("#version: 0.2\nw 1</w>\n")
    for dictionary in data.glob("dict.*.txt"):
        text = dictionary.read_text().replace("w1 ", f"{word} ")
        (tmp_path / dictionary.name).write_text(text, encoding="utf-8")
    export(path, tmp_path / "out", "--data", tmp_path, *options, *[tmp_path / "codes"] * len(options))
    printed = capsys.readouterr().err
    assert [option for option in ("--bpe-codes", "--sentencepiece-model") if option in printed] == named


def test_pieces_for_a_dictionary_of_words_are_reported() -> None:
    assert "--sentencepiece-model" in (about_subwords(["a", "b"], has_codes=False, has_pieces=True) or "")


def test_both_dictionaries_and_the_languages_suffice(data: Path, tmp_path: Path) -> None:
    path, only = checkpoint(data, tmp_path / "model.pt", "convs2s_tiny"), tmp_path / "only"
    saved = torch.load(path, weights_only=False)
    saved["args"].source_lang = saved["args"].target_lang = None  # fairseq saves None for inferred languages
    torch.save(saved, path)
    only.mkdir()
    for dictionary in data.glob("dict.*.txt"):
        shutil.copy(dictionary, only)
    assert "language pair" in refused("export", path, tmp_path / "out", "--data", only)
    export(path, tmp_path / "out", "--data", only, "-s", "src", "-t", "tgt")
    assert len(translate(tmp_path / "out")) == 4


def test_the_reversed_direction_is_refused(data: Path, tmp_path: Path) -> None:
    """With a shared dictionary, the model would be served for a direction that it was not trained for."""
    path = checkpoint(data, tmp_path / "model.pt", "convs2s_tiny")
    for option, language in (("--source-lang", "tgt"), ("--target-lang", "src")):
        assert option in refused("export", path, tmp_path / "out", "--data", data, option, language)


def test_a_task_that_puts_languages_into_text_is_refused(data: Path, tmp_path: Path) -> None:
    """The exported folder would omit the language tokens and translate differently."""
    path = checkpoint(data, tmp_path / "model.pt", "convs2s_tiny")
    options = ArgumentParser()
    TranslationMultiSimpleEpochTask.add_args(options)
    of_task = options.parse_args([str(data), "--langs", "src,tgt", "--lang-pairs", "src-tgt"])
    of_model = torch.load(path, weights_only=False)["args"]
    args = Namespace(**vars(of_model) | vars(of_task) | {"task": "translation_multi_simple_epoch", "seed": 1})
    task = TranslationMultiSimpleEpochTask.setup_task(args)
    save_model(ARCH_MODEL_REGISTRY[args.arch].build_model(args, task), args, path)
    assert "TranslationMultiSimpleEpochTask" in refused("export", path, tmp_path / "out", "--data", data)


def test_a_full_disk_and_a_kill_leave_no_folder(data: Path, tmp_path: Path) -> None:
    """The error names the folder; the next call removes the files that a killed call has left."""
    path, out = checkpoint(data, tmp_path / "model.pt", "convs2s_tiny"), tmp_path / "out"
    with full_disk(100_000):
        assert str(out) in refused("export", path, out, "--data", data)
    assert sorted(tmp_path.iterdir()) == [path]
    program = "import os, pathlib; pathlib.Path.replace = lambda *_: os.kill(os.getpid(), 9); " + MAIN
    assert python("-c", program, "export", path, out, "--data", data).returncode == -signal.SIGKILL
    assert [left.is_dir() for left in tmp_path.iterdir()].count(True) == 1
    export(path, out, "--data", data)
    assert sorted(tmp_path.iterdir()) == [path, out]
    assert (out / "SHA256SUMS").exists()


def test_models_that_cannot_be_exported(data: Path, tmp_path: Path) -> None:
    path = checkpoint(data, tmp_path / "model.pt", "convs2s_tiny")
    (tmp_path / "text").write_text("no checkpoint")
    (tmp_path / "there").mkdir()
    (tmp_path / "nowhere").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "fastbpe").write_text("t h 1234\n")  # codes of another program, for which subword-nmt exits
    before = sorted(tmp_path.iterdir())
    for words, name in (
        ([tmp_path / "nothing.pt", tmp_path / "out"], "nothing.pt"),
        ([f"{path}:{path}", tmp_path / "out"], "ensemble"),
        ([tmp_path / "text", tmp_path / "out"], "text"),
        ([path, tmp_path / "there"], "there"),
        ([path, tmp_path / "nowhere"], "nowhere"),
        ([path, tmp_path / "out", "--bpe-codes", tmp_path / "codes"], "codes"),
        ([path, tmp_path / "out", "--bpe-codes", tmp_path / "fastbpe"], "fastbpe"),
        ([path, tmp_path / "out", "--data", tmp_path / "dta"], "dta"),
        ([path, tmp_path / "out", "--data", data, "--candidates", tmp_path], "frequent.txt"),
        ([path, tmp_path / "out", "--data", data, "--frequent-candidates", 0], "--candidates"),
        ([path, tmp_path / "out", "--data", tmp_path], "--data"),
    ):
        assert name in refused("export", *words)
    assert sorted(tmp_path.iterdir()) == before
