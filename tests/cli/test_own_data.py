"""``fairseq-plugins own-data``: from two text files to the translations of fairseq's commands."""

from __future__ import annotations

import gzip
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils

import fairseq_plugins
from fairseq_plugins.cli.arguments import USER_DIR
from fairseq_plugins.cli.own_data import command as own_data
from fairseq_plugins.cli.own_data import results as own_results
from fairseq_plugins.cli.own_data.folder import Folder
from fairseq_plugins.common.files import work_in
from tests.cli.conftest import parse, refused, tool
from tests.commands import hypotheses, own_user_dir, python, run, run_own_data

fairseq_plugins.install()

TINY = "--encoder-layers '[(16, 3)]' --decoder-layers '[(16, 3)]' --max-epoch 2 --num-workers 0"
TINY += " --max-source-positions 64 --max-target-positions 64"

FOLDER = Folder(Path("out"), ("en", "de"), "sentencepiece")


def own(*words: object, stdin: str = "", succeeds: bool = True) -> subprocess.CompletedProcess[str]:
    result = run_own_data(*words, stdin=stdin)
    assert (result.returncode == 0) == succeeds, result.stderr[-4000:]
    return result


@pytest.fixture(scope="module")
def trained(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the folder and the output of a first call that has a test part."""
    out = tmp_path_factory.mktemp("trained") / "out"
    (out / "data-bin.partial").mkdir(parents=True)
    (out / "data-bin.partial" / "dict.en.txt").write_text("left 1\n")  # left by a killed call
    first = own(*call(texts, out), "--train", TINY)
    assert first.stdout == ""
    return out, first.stderr


def call(texts: Path, out: Path) -> list[object]:
    words = [texts / "train.en", texts / "train.de", out, "--arch", "convs2s_tiny"]
    return [*words, "--test", texts / "test.en", texts / "test.de"]


def commands(printed: str) -> list[list[str]]:
    return [shlex.split(line[2:]) for line in printed.splitlines() if line.startswith("$ ")]


def test_the_output_of_a_training(trained: tuple[Path, str], texts: Path) -> None:
    """own-data prints commands, progress, scores and samples; fairseq's output goes to the log."""
    out, printed = trained
    names = ["preprocess", "train", "validate", "validate", "generate", "plugins", "interactive", "plugins"]
    assert [words[0] for words in commands(printed)] == [f"fairseq-{name}" for name in names]
    assert re.findall(r"^epoch (\d), update", printed, flags=re.MULTILINE) == ["1", "2"]
    assert f"{out}/convs2s_tiny/train.log" in printed
    assert re.search(r"^BLEU \d+\.\d, chrF \d+\.\d \(sacreBLEU ", printed, flags=re.MULTILINE)
    samples = re.findall(r"^  source       (.*)\n  reference    (.*)\n  translation  .", printed, flags=re.MULTILINE)
    lines = [(texts / f"test.{language}").read_text().splitlines() for language in ("en", "de")]
    assert samples == [(source, target) for source, target in zip(*lines, strict=True) if len(source) < 99][:3]
    for chatter in ("\r", "INFO", "ModuleList", "it/s]"):
        assert chatter not in printed
    assert "ModuleList" in (out / "convs2s_tiny" / "train.log").read_text()


def test_an_architecture_in_a_user_directory(tmp_path: Path) -> None:
    """Training and translation use the given user directory, and no other one."""
    mine, other, broken = own_user_dir(tmp_path), tmp_path / "a_user_dir_of_others", tmp_path / "a_broken_user_dir"
    for folder, line in ((other, "import fairseq"), (broken, "import no_such_module")):
        folder.mkdir()
        (folder / "__init__.py").write_text(line)
    program = (
        "import sys; from pathlib import Path; from fairseq_plugins.cli.own_data.training import Training\n"
        "for user_dir in sys.argv[1:]:\n"
        "    try: print(Training('convs2s_of_mine', Path('out'), [], Path(user_dir)).model.family)\n"
        "    except ValueError as error: print(error)"
    )
    *refused, accepted = python("-c", program, other, broken, "user_dir", mine).stdout.splitlines()
    assert accepted == "convs2s"
    for error, name in zip(refused, ("install()", f"--user-dir {broken} ", "convs2s_of_mine"), strict=True):
        assert name in error


def test_held_out_lines_of_the_validation_part(
    trained: tuple[Path, str], texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a test part, own-data scores every tenth line of the text, in its original form."""
    out, _ = trained
    (tmp_path / "text").mkdir()
    for part in ("train", "valid"):
        for language in ("en", "de"):
            shutil.copy(out / "text" / f"{part}.{language}", tmp_path / "text")
    for name in ("data-bin", "subwords.model"):
        (tmp_path / name).symlink_to(out / name)
    folder = Folder(tmp_path, ("en", "de"), "sentencepiece")
    options = folder.decoding_options(out / "convs2s_tiny" / "checkpoint_best.pt", USER_DIR)
    own_results.score_held_out(folder, tmp_path, options)
    found = capsys.readouterr().err
    assert "validation part (held-out lines: 29" in found
    for name, language in (("source     ", "en"), ("reference  ", "de")):
        first, _, *others = (texts / f"train.{language}").read_text().splitlines()[9:40:10]
        assert re.findall(rf"^  {name}  (.*)$", found, flags=re.MULTILINE) == [first, *others]


def test_from_two_files_to_translations(trained: tuple[Path, str], texts: Path) -> None:
    """Translations of a file equal those of the printed commands and of the exported folder."""
    out, printed = trained
    shown, words = commands(printed), call(texts, out)
    with work_in(out):  # as another training in this folder would do
        sentences = (texts / "test.en").read_text()
        gone = ["a.en", "a.de", *words[2:5]]  # these training files do not exist
        second = own(*gone, "--train", TINY, "--translate", "-", stdin=f"\n{sentences} \n")
        assert f"{out} " in own(*words, succeeds=False).stderr
    before, *translations, after = second.stdout.split("\n")[:-1]
    assert before == after == ""  # models would translate blank lines to invented words
    assert len(translations) == 7
    (command,) = commands(second.stderr)
    assert re.search(r"line 3 has \d+ tokens: only the first 63 ", second.stderr)
    assert command[0] == "fairseq-interactive"

    tool(*shown[-1][1:])
    program = str(out / "convs2s_tiny.exported" / "translate.py")
    command = [sys.executable, "-I", program, "--input", str(texts / "test.en")]
    exported = subprocess.run(command, capture_output=True, text=True, check=True)
    assert exported.stdout.split("\n")[:-1] == translations
    result = run(*[shown[-2][0].removeprefix("fairseq-"), *shown[-2][1:]], "--input", texts / "test.en")
    assert sorted(hypotheses(result.stdout)) == list(range(7))
    assert re.findall(r"^D-\d+\t\S+\t(.*)$", result.stdout, flags=re.MULTILINE) == translations

    backwards = own("a.de", "a.en", *words[2:5], "--translate", "-", succeeds=False).stderr
    assert f"--translate: {out}/data-bin " in backwards
    other = own(*words, "--train", f"{TINY} --dropout 0.5", succeeds=False).stderr.splitlines()[-1]
    assert f"--metric loss --train {shlex.quote(TINY)}" in other


def test_a_model_is_adapted(trained: tuple[Path, str], texts: Path, tmp_path: Path) -> None:
    """The new model keeps the base model's subwords, dictionary and sizes, and starts from its parameters."""
    base, out = trained[0], tmp_path / "out"
    own(texts / "train.en", texts / "train.de", out, "--from", base, "--train", "--max-epoch 1 --lr 1e-9")
    for name in ("subwords.model", "data-bin/dict.en.txt"):
        assert (out / name).read_bytes() == (base / name).read_bytes()
    card = (out / "convs2s_tiny" / "README.md").read_text().partition("\n## Commands\n")[0]
    assert f"`checkpoint_best.pt` of the folder `{base.name}`\n" in card
    for local in (base, out, USER_DIR, texts):
        assert str(local) not in card
    before, after = (
        checkpoint_utils.load_checkpoint_to_cpu(str(folder / "convs2s_tiny" / "checkpoint_best.pt"))["model"]
        for folder in (base, out)
    )
    assert all(torch.allclose(value, after[name], atol=1e-3) for name, value in before.items())
    for words, message in (
        (["--from", tmp_path], f"error: {tmp_path} "),
        (["--from", base, "--arch", "convs2s"], "--arch convs2s"),
        (["--from", base, "--tokenizer", "moses"], "--tokenizer moses"),
        (["--from", base, "--target-lang", "nl"], f"--from {base}"),
    ):
        assert message in own(texts / "train.en", texts / "train.de", tmp_path / "x", *words, succeeds=False).stderr


def test_a_finished_training_is_continued(trained: tuple[Path, str], texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(trained[0], out)
    printed = own(*call(texts, out), "--train", TINY.replace("--max-epoch 2", "--max-epoch 3")).stderr
    assert re.findall(r"^epoch (\d), update", printed, flags=re.MULTILINE) == ["3"]


def test_translation_without_target_has_the_languages_of_the_folder(tmp_path: Path) -> None:
    args, before = parse("folder", str(tmp_path), "--translate", "-"), Folder(tmp_path, ("en", "de"), "moses")
    assert own_data.languages_for(args, before, {}) == ("en", "de")
    args.source_lang = "de"
    with pytest.raises(ValueError, match=r"^--source-lang de: "):
        own_data.languages_for(args, before, {})


def test_options_of_an_earlier_training(tmp_path: Path) -> None:
    """A finished model stays without --train or with its options; a stopped training resumes with its own options."""
    args = parse("a.en", "a.de", "out", "--arch", "convs2s_tiny", "--train", "--lr '1'")
    for name, checkpoint in (("finished", "checkpoint_best.pt"), ("begun", "checkpoint_last.pt")):
        (folder := tmp_path / name).mkdir()
        (folder / name).write_text("--lr 1\n")
        for args.train in ("--lr 2", "--lr '1'"):
            assert own_data.plan(args, folder, FOLDER) is not None, "without a checkpoint, any options are accepted"
        (folder / checkpoint).touch()
        for args.train in ("--lr 2", "") if name == "begun" else ("--lr 2",):
            with pytest.raises(ValueError, match="--lr 1"):
                own_data.plan(args, folder, FOLDER)
        args.train = "--lr '1'"
        assert (own_data.plan(args, folder, FOLDER) is None) == (name == "finished")
    args.train = ""
    assert own_data.plan(args, tmp_path / "finished", FOLDER) is None
    args.metric = "chrf"
    with pytest.raises(ValueError, match="--metric loss"):
        own_data.plan(args, tmp_path / "finished", FOLDER)
    (tmp_path / "begun" / "begun").write_text("--metric chrf --lr 1\n")
    for args.metric, args.train in (("loss", "--lr 1"), (None, "--lr 2")):
        with pytest.raises(ValueError, match="--metric chrf --train '--lr 1'"):
            own_data.plan(args, tmp_path / "begun", FOLDER)


def test_typed_lines_are_translated_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []
    monkeypatch.setattr(own_results, "translations", lambda options: given.extend(options[:2]) or [])
    terminal, pipe = os.openpty()[1], os.pipe()[0]
    for stream, text, size in ((terminal, "-", 1), (pipe, "-", 1000), (terminal, "a.en", 1000)):
        given.clear()
        with open(stream, closefd=False) as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            own_results.translate(text, [])
        assert given == ["--buffer-size", size]


def test_a_pipe_may_be_translated(tmp_path: Path) -> None:
    """A pipe such as <(zcat text.gz) can be translated: no byte is read before the translation."""
    os.mkfifo(tmp_path / "pipe")
    for left, right in (os.pipe(), (os.open(tmp_path / "pipe", os.O_RDWR),) * 2):
        os.write(right, b"\x1f\x8b")
        own_data.refuse_no_text(f"/dev/fd/{left}")
        assert os.read(left, 9) == b"\x1f\x8b"


# The words of each wrong call, in which "T." begins the names of training texts, and a part of the error.
WRONG = [
    ("T.en T.de OUT --arch nothing", "--arch nothing"),
    ("text.txt T.de OUT", "--source-lang"),
    ("T.de T.de OUT", "both de"),
    ("T.en T.de OUT --target-lang ../de", "--target-lang ../de"),
    ("few.en few.de OUT", "after cleaning"),
    ("nothing OUT", "nothing"),
    ("T.en T.de OUT --test T.en few.de", "train.en"),
    ("latin1.en T.de OUT", "UTF-8"),
    ("T.en T.de OUT --valid empty.en empty.de", "--valid"),
    ("T.en T.de OUT --test folder/en folder/de", "folder/en"),
    ("T.en T.de OUT --translate no.en", "--translate: no.en"),
    ("T.en T.de OUT --translate folder", "--translate: folder"),
    ("T.en T.de OUT --translate a.gz", "a.gz"),
    ("T.en T.de OUT --translate T.en", "--translate"),
    ("T.en T.de half --translate T.en", "half/convs2s_iwslt_de_en/checkpoint_best.pt"),
    ("T.en T.de OUT '--train=--max-epoch \"3'", "--train --max-epoch"),
    ("T.en T.de OUT '--train=--max-epoch x'", "--max-epoch"),
    ("T.en T.de OUT '--train=--lr [1'", "--train: "),
    ("T.en T.de OUT '--train=--user-dir missing'", "--train: --user-dir"),
    ("T.en T.de OUT '--train=--arch fconv'", "--arch"),
    ("T.en T.de OUT '--train=--no-save'", "--no-save"),
    *((f"T.en T.de '{name}'", name) for name in ("a,b", "a:b", "a\\b", "x${oc.env:HOME}")),
    ("T.en T.de .", "train.en"),
    ("T.en T.de left", "left/convs2s_iwslt_de_en"),
    ("T.en T.de old", "old/settings"),
    ("T.en T.de OUT --from old", "old/settings"),
]


def test_a_wrong_call_gets_a_clear_error(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = {"few.en": "x\n", "few.de": "x\n", "text.txt": "x\n"}
    for language in ("en", "de"):
        (tmp_path / "folder" / language / "old").mkdir(parents=True)
        contents[f"empty.{language}"] = ""
        contents[f"train.{language}"] = (texts / f"train.{language}").read_text()
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "latin1.en").write_bytes(b"gr\xfc\xdfe\n" * 300)
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"x\n"))
    for folder in ("left/convs2s_iwslt_de_en", "half/convs2s_iwslt_de_en", "old"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "half" / "convs2s_iwslt_de_en" / "checkpoint_best.pt").touch()
    (tmp_path / "old" / "settings").write_text("Corpus(source='en', target='de')\n")  # version 0.1.0 wrote this
    monkeypatch.chdir(tmp_path)
    for words, name in WRONG:
        assert name in refused("own-data", *shlex.split(words.replace("T.", "train.")))
        assert not Path("OUT", "settings").exists(), words
