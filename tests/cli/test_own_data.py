"""``fairseq-plugins own-data``: two text files, and at the end translations, which fairseq's own commands give too."""

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
from fairseq_plugins.cli import main as cli
from fairseq_plugins.cli.files import work_in
from fairseq_plugins.cli.main import parse as command_line
from fairseq_plugins.cli.own_data import command as own_data
from fairseq_plugins.cli.own_data import translations as own_translations
from fairseq_plugins.cli.own_data.folder import Folder
from fairseq_plugins.cli.user_dir import USER_DIR
from tests.cli.conftest import parse
from tests.commands import MAIN, hypotheses, own_user_dir, python, run

fairseq_plugins.install()

TINY = "--encoder-layers '[(16, 3)]' --decoder-layers '[(16, 3)]' --max-epoch 2 --num-workers 0"
TINY += " --max-source-positions 64 --max-target-positions 64"


def own(*words: object, stdin: str | None = None, succeeds: bool = True) -> subprocess.CompletedProcess[str]:
    result = python("-c", MAIN, "own-data", *words, stdin=stdin)
    assert (result.returncode == 0) == succeeds, result.stderr[-4000:]
    return result


@pytest.fixture(scope="module")
def trained(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """What a first call with a test part has made, and what it has printed."""
    out = tmp_path_factory.mktemp("trained") / "out"
    (out / "data-bin.partial").mkdir(parents=True)
    (out / "data-bin.partial" / "dict.en.txt").write_text("left 1\n")  # by a call that was killed
    first = own(*call(texts, out), "--train", TINY)
    assert first.stdout == ""
    return out, first.stderr


def test_an_architecture_of_ones_own(tmp_path: Path) -> None:
    """Its user directory is that of training and of translations, and no other one."""
    mine, other, broken = own_user_dir(tmp_path), tmp_path / "a_user_dir_of_others", tmp_path / "a_broken_user_dir"
    for folder, line in ((other, "import fairseq"), (broken, "import no_such_module")):
        folder.mkdir()
        (folder / "__init__.py").write_text(line)
    program = (
        "import sys; from pathlib import Path; from fairseq_plugins.cli.own_data.training import Training\n"
        "for user_dir, *wishes in map(str.split, sys.argv[1:]):\n"
        "    try: print(Training('convs2s_of_mine', Path('out'), wishes, Path(user_dir)).model.family)\n"
        "    except ValueError as error: print(error)"
    )
    result = python("-c", program, "user_dir", other, broken, f"{mine} --user-dir user_dir", mine)
    told = (
        "there is no such architecture; this plugin has convs2s",
        "must call fairseq_plugins.install",
        f"--user-dir {broken}: No module named 'no_such_module'",
        "so --user-dir cannot be given there",
        "convs2s",
    )
    for line, message in zip(result.stdout.splitlines(), told, strict=True):
        assert message in line


def call(texts: Path, out: Path) -> list[object]:
    words = [texts / "train.en", texts / "train.de", out, "--arch", "convs2s_tiny"]
    return [*words, "--test", texts / "test.en", texts / "test.de"]


def commands(printed: str) -> list[list[str]]:
    return [shlex.split(line[2:]) for line in printed.splitlines() if line.startswith("$ ")]


def test_what_a_training_tells(trained: tuple[Path, str], texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Commands, progress, scores and samples, and nothing that fairseq prints; all that is in the log."""
    out, printed = trained
    names = ["preprocess", "train", "generate", "plugins", "interactive", "plugins"]
    assert [words[0] for words in commands(printed)] == [f"fairseq-{name}" for name in names]
    assert re.findall(r"^epoch (\d), update \d+: validation loss \d", printed, flags=re.MULTILINE) == ["1", "2"]
    assert re.search(r"^An epoch has \d+ updates and takes \d+ s(; about \d+ s left)?\.$", printed, flags=re.MULTILINE)
    assert f"messages are in {out}/convs2s_tiny/train.log." in printed
    assert re.search(
        r"^On this CPU it takes about \d+ s for an epoch, and about \d+ s for", printed, flags=re.MULTILINE
    )
    assert re.search(
        r"^1 lines of the test part are too long for the model and left out\.\n\n"
        r"6 lines of the test part, .*\nBLEU \d+\.\d, chrF \d+\.\d \(sacreBLEU ",
        printed,
        flags=re.MULTILINE,
    )
    samples = re.findall(r"^  source       (.*)\n  reference    (.*)\n  translation  .", printed, flags=re.MULTILINE)
    lines = [(texts / f"test.{language}").read_text().splitlines() for language in ("en", "de")]
    assert samples == [(source, target) for source, target in zip(*lines, strict=True) if len(source) < 99][:3]
    left_out = "1 sentence pairs are too long for the model and left out."
    assert printed.splitlines().count(left_out) == 2, "in training and in validation"
    for chatter in ("\r", "INFO", "ModuleList", "it/s]"):
        assert chatter not in printed
    log = (out / "convs2s_tiny" / "train.log").read_text()
    assert "ModuleList" in log
    assert "{'_name'" not in log


def test_the_curve_of_a_folder(trained: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of OUT, and of the model in it by the command that is shown."""
    pytest.importorskip("matplotlib")
    out, printed = trained
    cli.main(["plot-loss", str(out), "--output", str(tmp_path / "loss.svg")])
    of_all = capsys.readouterr().out.splitlines()
    cli.main(commands(printed)[3][1:])
    shown = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"{out}/convs2s_tiny/train\.log: \d\.\d+ at update \d+", of_all[0])
    assert shown == [of_all[0], f"{out}/convs2s_tiny/loss.png"]


def test_held_out_lines_of_the_validation_part(
    trained: tuple[Path, str], texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where there is no test part; every tenth line of the text, as it stands there."""
    out, _ = trained
    (tmp_path / "text").mkdir()
    for part in ("train", "valid"):
        for language in ("en", "de"):
            shutil.copy(out / "text" / f"{part}.{language}", tmp_path / "text")
    for name in ("data-bin", "subwords.model"):
        (tmp_path / name).symlink_to(out / name)
    folder = Folder(tmp_path, ("en", "de"), "sentencepiece")
    options = folder.decoding_options(out / "convs2s_tiny" / "checkpoint_best.pt", USER_DIR)
    own_translations.score_held_out(folder, tmp_path, options)
    found = capsys.readouterr().err
    assert "29 lines of the validation part" in found
    for name, language in (("source     ", "en"), ("reference  ", "de")):
        first, _, *others = (texts / f"train.{language}").read_text().splitlines()[9:40:10]
        assert re.findall(rf"^  {name}  (.*)$", found, flags=re.MULTILINE) == [first, *others]


def test_from_two_files_to_translations(trained: tuple[Path, str], texts: Path) -> None:
    """Translations are as the shown commands make them by hand, of a file, and as the exported folder makes them."""
    out, printed = trained
    shown, words = commands(printed), call(texts, out)
    with work_in(out):  # by another architecture's training, say
        sentences = (texts / "test.en").read_text()
        gone = ["a.en", "a.de", *words[2:5]]  # what it was trained on
        second = own(*gone, "--train", TINY, "--translate", "-", stdin=f"\n{sentences} \n")
        assert f"another call, or what it has started, is at work in {out}" in own(*words, succeeds=False).stderr
    before, *translations, after = second.stdout.split("\n")[:-1]
    assert before == after == ""  # models make something up of nothing
    assert len(translations) == 7
    (command,) = commands(second.stderr)
    assert second.stderr.splitlines()[1] == f"$ {shlex.join(command)}"
    assert re.search(r"^\n.*\n.*[: ]line 3 has \d+ tokens: only the first 63 are translated\n$", second.stderr)
    assert command[0] == "fairseq-interactive"

    cli.main(shown[-1][1:])
    program = str(out / "convs2s_tiny.exported" / "translate.py")
    command = [sys.executable, "-I", program, "--input", str(texts / "test.en")]
    exported = subprocess.run(command, capture_output=True, text=True, check=True)
    assert exported.stdout.split("\n")[:-1] == translations
    result = run(*[shown[-2][0].removeprefix("fairseq-"), *shown[-2][1:]], "--input", texts / "test.en")
    assert sorted(hypotheses(result.stdout)) == list(range(7))
    assert re.findall(r"^D-\d+\t\S+\t(.*)$", result.stdout, flags=re.MULTILINE) == translations

    backwards = own("a.de", "a.en", *words[2:5], "--translate", "-", succeeds=False).stderr
    assert f"--translate: {out}/data-bin was not made for de to en" in backwards
    other = own(*words, "--train", f"{TINY} --dropout 0.5", succeeds=False).stderr.splitlines()[-1]
    assert f"has been trained, with --train {shlex.quote(TINY)}: choose another folder, or remove {out}" in other


@pytest.mark.parametrize("name", ["a,b", "a:b", "a\\b", "x${oc.env:HOME}"])
def test_names_that_fairseq_takes_apart_are_refused(name: str, texts: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="folder's name"):
        cli.main(["own-data", str(texts / "train.en"), str(texts / "train.de"), str(tmp_path / name)])
    assert not list(tmp_path.iterdir())


def test_options_between_the_texts() -> None:
    """As of train.en train.de --arch X OUT, though TARGET may be left out."""
    for words, expected in (
        (["a.en", "a.de", "--arch", "x", "out"], ("a.en", "a.de", "out")),
        (["--arch", "x", "a.en", "--workers", "2", "a.de", "out"], ("a.en", "a.de", "out")),
        (["a.po", "--arch", "x", "out"], ("a.po", "None", "out")),
    ):
        args = command_line(["own-data", *words])
        assert (*map(str, (args.source, args.target, args.output)), args.arch) == (*expected, "x")


def test_nobody_prepares_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for number in ("0", "-1", "x"):
        with pytest.raises(SystemExit):
            parse("a.en", "a.de", "out", f"--workers={number}")
        assert f"--workers: expected a number from 1 on, got '{number}'" in capsys.readouterr().err


def test_a_model_is_adapted(trained: tuple[Path, str], texts: Path, tmp_path: Path) -> None:
    """With its subwords, dictionary and sizes; it starts from its parameters."""
    base, out = trained[0], tmp_path / "out"
    own(texts / "train.en", texts / "train.de", out, "--from", base, "--train", "--max-epoch 1 --lr 1e-9")
    for name in ("subwords.model", "data-bin/dict.en.txt"):
        assert (out / name).read_bytes() == (base / name).read_bytes()
    card = (out / "convs2s_tiny" / "README.md").read_text()
    assert f"- Adapted from: `checkpoint_best.pt` of the folder `{base.name}`\n" in card
    before, after = (
        checkpoint_utils.load_checkpoint_to_cpu(str(folder / "convs2s_tiny" / "checkpoint_best.pt"))["model"]
        for folder in (base, out)
    )
    assert all(torch.allclose(value, after[name], atol=1e-3) for name, value in before.items())
    for words, message in (
        (["--from", tmp_path], "is not a folder of own-data"),
        (["--from", base, "--arch", "convs2s"], "no such trained model"),
        (["--from", base, "--tokenizer", "moses"], "has text for sentencepiece"),
        (["--from", base, "--target-lang", "nl"], "translates en to de: not en to nl"),
    ):
        assert message in own(texts / "train.en", texts / "train.de", tmp_path / "x", *words, succeeds=False).stderr


def test_a_finished_training_is_continued(trained: tuple[Path, str], texts: Path, tmp_path: Path) -> None:
    """By a later end alone."""
    out = tmp_path / "out"
    shutil.copytree(trained[0], out)
    printed = own(*call(texts, out), "--train", TINY.replace("--max-epoch 2", "--max-epoch 3")).stderr
    assert re.findall(r"^epoch (\d), update", printed, flags=re.MULTILINE) == ["3"]


def test_a_folder_of_an_earlier_version(texts: Path, tmp_path: Path) -> None:
    """Which recorded a corpus, and kept Moses' tokens of the held-out parts."""
    out = tmp_path / "out"
    own(*call(texts, out), "--tokenizer", "moses", "--train", TINY)
    shutil.move(out / "tokens", out / "tmp")
    shutil.move(out / "text" / "test.de", out / "test.reference")
    shutil.rmtree(out / "text")
    (out / "settings").write_text("Corpus(source='en', target='de', train=(), tests=())\n")
    printed = own(*call(texts, out)).stderr
    assert "fairseq-train" not in printed
    assert f"--bpe-codes {out}/code" in printed
    for language in ("en", "de"):
        assert (out / "text" / f"test.{language}").read_text() == (texts / f"test.{language}").read_text()


@pytest.mark.parametrize("left", [{"finished"}, {"checkpoint_best.pt"}])
def test_a_half_finished_training_goes_on(left: set[str], tmp_path: Path) -> None:
    for name in left:
        (tmp_path / name).touch()
    assert own_data.plan(parse("a.en", "a.de", "out", "--arch", "convs2s_tiny"), tmp_path) is not None


def test_options_of_a_finished_training(tmp_path: Path) -> None:
    """Without --train it is as it is; of a call of former versions it is not known which they were."""
    (tmp_path / "checkpoint_best.pt").touch()
    for trained, asked, refused in (
        ("", "--lr 1", False),
        ("--lr 1", "", False),
        ("--lr 1", "--lr '1'", False),
        ("--lr 1", "--lr 2", True),
        (" ", "--lr 2", True),
    ):
        (tmp_path / "finished").write_text(trained)
        args = parse("a.en", "a.de", "out", "--train", asked)
        if refused:
            with pytest.raises(ValueError, match=f"or remove {tmp_path} to train again"):
                own_data.plan(args, tmp_path)
        else:
            assert own_data.plan(args, tmp_path) is None


def test_options_of_a_half_finished_training(tmp_path: Path) -> None:
    """It goes on with those that it began with; before there is anything to go on with, they may change."""
    (tmp_path / "begun").write_text("--lr 1\n")
    args = parse("a.en", "a.de", "out", "--arch", "convs2s_tiny", "--train", "--lr 2")
    assert own_data.plan(args, tmp_path) is not None
    (tmp_path / "checkpoint_last.pt").touch()
    for asked in ("--lr 2", ""):
        args.train = asked
        with pytest.raises(ValueError, match=f"--train '--lr 1': give that again, or remove {tmp_path}/begun to go on"):
            own_data.plan(args, tmp_path)
    args.train = "--lr '1'"
    assert own_data.plan(args, tmp_path) is not None
    (tmp_path / "begun").unlink()
    args.train = "--lr 2"
    assert own_data.plan(args, tmp_path) is not None


def test_what_is_typed_is_translated_at_once() -> None:
    terminal = os.openpty()[1]
    pipe = os.pipe()[0]
    with open(terminal) as typed, open(pipe) as piped:  # noqa: PTH123  (descriptors)
        assert own_translations.batches("-", typed) == ["--buffer-size", 1]
        assert own_translations.batches("-", piped) == own_translations.batches("a.en", typed)
        assert own_translations.batches("a.en", typed)[:2] == ["--buffer-size", 1000]


def test_a_pipe_may_be_translated(tmp_path: Path) -> None:
    """As of <(zcat text.gz), of which nothing is taken before."""
    os.mkfifo(tmp_path / "pipe")
    for left, right in (os.pipe(), (os.open(tmp_path / "pipe", os.O_RDWR),) * 2):
        os.write(right, b"\x1f\x8b")
        own_data.refuse_no_text(Path(f"/dev/fd/{left}"))
        assert os.read(left, 9) == b"\x1f\x8b"
    with pytest.raises(ValueError, match="there is no file"):
        own_data.refuse_no_text(tmp_path)


@pytest.mark.parametrize(("arch", "is_ours"), [("convs2s", True), ("fconv", False)])
def test_an_export_is_shown_if_it_can_be_made(arch: str, is_ours: bool) -> None:
    folder = Folder(Path("out"), ("en", "de"), "sentencepiece")
    shown = own_data.next_commands(parse("a.en", "a.de", "out", "--arch", arch), folder, Path("out"), [])
    assert any(words.startswith("fairseq-plugins export ") for words in shown.values()) == is_ours


def test_a_wrong_call_gets_a_clear_error(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "few.en").write_text("x\n")
    (tmp_path / "few.de").write_text("x\n")
    (tmp_path / "text.txt").write_text("x\n")
    (tmp_path / "short.en").write_text("x\n" * 299)
    (tmp_path / "latin1.en").write_bytes(b"gr\xfc\xdfe\n" * 300)
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"x\n"))
    (tmp_path / "utf16").write_bytes("x\n".encode("utf-16"))
    for language in ("en", "de"):
        (tmp_path / "none" / language / "old").mkdir(parents=True)
        (tmp_path / f"empty.{language}").write_text("")
        (tmp_path / f"blank.{language}").write_text("\n" * 40)
        (tmp_path / f"train.{language}").write_text((texts / f"train.{language}").read_text())
    empty, blank, beside = (
        [str(tmp_path / f"{name}.{end}") for end in ("en", "de")] for name in ("empty", "blank", "train")
    )
    (tmp_path / "left" / "convs2s_iwslt_de_en").mkdir(parents=True)
    folders = [str(tmp_path / "none" / language) for language in ("en", "de")]
    english = str(texts / "train.en")
    german, out = str(texts / "train.de"), str(tmp_path / "out")
    for words, message in (
        ([english, german, out, "--arch", "nothing"], "there is no such architecture"),
        ([str(tmp_path / "text.txt"), german, out], "give --source-lang"),
        ([str(texts), german, out, "--source-lang", "en"], "two files or two folders"),
        ([german, german, out], "are both de"),
        ([english, german, out, "--target-lang", "../de"], "'../de' is not a language's name"),
        ([english, german, out, "--source-lang", "reference"], "'reference' is not a language's name"),
        ([str(tmp_path / "few.en"), str(tmp_path / "few.de"), out], "too few to learn from"),
        ([str(tmp_path / "no.en"), german, out], "does not exist"),
        ([str(tmp_path / "short.en"), german, out], f"short.en has 299 lines and {german} 300"),
        ([english, german, out, "--test", english, str(texts / "test.de")], "train.en has 300 lines and"),
        ([str(tmp_path / "latin1.en"), german, out], "not UTF-8"),
        ([english, german, out, "--test", *empty], "--test: the text has no pairs"),
        ([english, german, out, "--valid", *empty], "--valid: the text has no pairs"),
        ([english, german, out, "--translate", "no.en"], "--translate: there is no file no.en"),
        ([english, german, out, "--translate", english], f"there is no trained model in {out}/convs2s_iwslt_de_en"),
        ([english, german, out, "--train", "--max-epoch '3"], "--train: No closing quotation: --max-epoch '3"),
        ([english, german, out, "--train", "--no-such 3"], "--train: unrecognized arguments: --no-such 3"),
        ([english, german, out, "--train", "--max-epoch x"], "--train: argument --max-epoch: invalid int value: 'x'"),
        ([english, german, out, "--train", "--lr [1"], "--lr: must be finite numbers, separated by commas, got '[1'"),
        ([english, german, out, "--train", "--save-dir else"], "convs2s_iwslt_de_en/checkpoint_best.pt, so --save-dir"),
        ([english, german, out, "--train=--no-save"], "so --no-save cannot be given there"),
        ([english, german, out, "--train=--disable-validation"], "so --disable-validation cannot be given there"),
        ([english, german, out, "--train=--checkpoint-suffix=x"], "so --checkpoint-suffix cannot be given there"),
        ([english, german, out, "--train", "--arch fconv"], "so --arch cannot be given there"),
        ([english, german, out, "--train", "--target-lang en"], "so --target-lang cannot be given there"),
        ([english, german, out, "--translate", str(tmp_path / "a.gz")], "a.gz is no plain text in UTF-8"),
        ([english, german, out, "--translate", str(tmp_path / "utf16")], "utf16 is no plain text in UTF-8"),
        ([*beside, str(tmp_path)], "train.en already exists"),
        ([*blank, str(tmp_path / "tokens")], "too few to learn from"),
        ([english, german, out, "--test", *folders], "none/en has no files"),
        ([english, german, str(tmp_path / "left")], "convs2s_iwslt_de_en already exists"),
    ):
        with pytest.raises(SystemExit, match=re.escape(message)):
            cli.main(["own-data", *words])
        assert not Path(out, "settings").exists(), words
