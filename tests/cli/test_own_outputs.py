"""Commands that read own-data's folder: scores, length penalty, model card, plots, lexicon."""

from __future__ import annotations

import os
import random
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import sacrebleu

from fairseq_plugins import common
from fairseq_plugins.cli import score
from fairseq_plugins.cli.figure import fonts_for
from fairseq_plugins.cli.own_data.folder import Folder
from tests.cli.conftest import refused, tool
from tests.cli.test_own_data import TINY, own
from tests.commands import ROOT, USER_DIR, started

NOUNS = {"dog": "\u72ac", "man": "\u7537", "well-known boat": "\u6709\u540d\u306a\u8239", "horse": "\u99ac"}
ARCH = "convs2s_tiny"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Train English to Japanese; line 2 of the test part is too long for the model."""
    folder = tmp_path_factory.mktemp("made")
    for part, size, first in (("train", 299, 0), ("test", 9, 1000)):
        generator = random.Random(1)
        pairs = [(*generator.choices([*NOUNS], k=2), number) for number in range(first, first + size)]
        english = [f"A {a}, and {number} times a {b}." for a, b, number in pairs]
        japanese = [f"{NOUNS[a]}\u3068{number}\u56de\u306e\u300c{NOUNS[b]}\u300d\u3002" for a, b, number in pairs]
        if part == "test":
            english[1] = "A man. " * 90
        else:
            english, japanese = [*english, english[0]], [*japanese, japanese[0]]
        (folder / f"{part}.en").write_text("".join(f"{line}\n" for line in english), encoding="utf-8")
        (folder / f"{part}.ja").write_text("".join(f"{line}\n" for line in japanese), encoding="utf-8")
    out = folder / "out"
    words = [folder / "train.en", folder / "train.ja", out, "--arch", ARCH, "--train", TINY]
    words += ["--test", folder / "test.en", folder / "test.ja"]
    return SimpleNamespace(folder=folder, out=out, words=words, model=out / ARCH, printed=own(*words).stderr)


def test_a_model_has_one_score(made: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    """All commands print sacreBLEU's score of the original test part."""
    lines = (made.model / "generate-test.txt").read_text(encoding="utf-8").splitlines()
    found = {int(line[2:].split("\t")[0]): line.split("\t")[2] for line in lines if line.startswith("D-")}
    assert sorted(found) == [0, 2, 3, 4, 5, 6, 7, 8]
    references = (made.folder / "test.ja").read_text(encoding="utf-8").splitlines()
    texts = [found[number] for number in sorted(found)], [[references[number] for number in sorted(found)]]
    tokenizer = "ja-mecab" if find_spec("MeCab") and find_spec("ipadic") else "char"
    bleu = sacrebleu.corpus_bleu(*texts, tokenize=tokenizer).score
    expected = f"BLEU {bleu:.1f}, chrF {sacrebleu.corpus_chrf(*texts).score:.1f} (sacreBLEU (nrefs:1|"
    tool("score", made.out)
    printed = capsys.readouterr().out
    assert expected in printed
    assert f"|tok:{tokenizer}" in printed
    assert printed in made.printed
    assert f"BLEU {bleu:.1f} " in (made.model / "README.md").read_text()


def test_folders_that_cannot_be_scored(made: SimpleNamespace, tmp_path: Path) -> None:
    """Other folders, truncated or outdated translations, and several models are refused."""
    out = tmp_path / "out"
    shutil.copytree(made.out, out)
    generated, best = out / ARCH / "generate-test.txt", out / ARCH / "checkpoint_best.pt"
    whole = generated.read_bytes()
    for words, name in (
        ([tmp_path], str(tmp_path)),
        ([out, "--tokenize", "zh"], "--tokenize"),
        ([], "--generated"),
        (["--generated", generated], "--reference"),
    ):
        assert name in refused("score", *words)
    generated.write_bytes(whole.rpartition(b"\nGenerate ")[0])
    assert "generate-test.txt" in refused("score", out)
    generated.write_bytes(whole)
    tool("score", out)
    os.utime(best, (later := generated.stat().st_mtime + 9, later))
    assert "generate-test.txt" in refused("score", out)
    shutil.copytree(out / ARCH, out / "another")
    assert "--arch another" in refused("score", out)


def test_the_length_penalty_of_a_folder(made: SimpleNamespace, capfd: pytest.CaptureFixture[str]) -> None:
    """N-best lists are generated once; a search with the best penalty gives the same sacreBLEU score as the lists."""
    for call in range(2):
        tool("tune-length", made.out, "--alphas", 1, 2)
        printed = capfd.readouterr()
        assert ("$ fairseq-generate " in printed.err) == (call == 0)
        assert "validation part (held-out lines: 29)" in printed.out
        assert re.search(r"^best options on 29 sentences: --lenpen [12]$", printed.out, re.MULTILINE)
    texts: dict[int, list[str]] = {}
    for line in (made.model / "nbest" / "generate-valid.txt").read_text(encoding="utf-8").split("\n"):
        if line.startswith("D-"):
            texts.setdefault(int(line[2:].split("\t")[0]), []).append(line.split("\t")[2])
    assert {len(hypotheses) for hypotheses in texts.values()} == {5}
    best = [texts[number][0] for number in sorted(texts)]
    references = (made.out / "text" / "valid.ja").read_text(encoding="utf-8").splitlines()
    expected = sacrebleu.corpus_bleu(best, [references], tokenize=score.tokenizer_for("ja"), force=True).score
    (found,) = re.findall(r"^ +1 +0 +(\S+) ", printed.out, re.MULTILINE)
    assert float(found) == pytest.approx(expected, abs=0.006)
    assert "--reference" in refused("tune-length", made.out, "--reference", made.folder / "test.ja")


def test_the_model_card(made: SimpleNamespace, tmp_path: Path) -> None:
    """The card has the facts of the training, keeps the user's edits, and is copied to exported folders."""
    card = (made.model / "README.md").read_text(encoding="utf-8")
    for fact in (
        "`train.en` (SHA-256 ",
        "`test.en` (SHA-256 ",
        "300 read, 270 for training, 29 for validation (held out), 9 for the test\n",
        "--encoder-layers '[(16, 3)]'",
        f"    fairseq-interactive {made.out}/data-bin --source-lang en --target-lang ja ",
    ):
        assert fact in card
    log = (made.model / "train.log").read_text()
    (parameters,) = re.findall(r"num. shared model params: (\S+) ", log)
    updates = re.findall(r'"valid_num_updates": "(\d+)"', log)[-1]
    assert f"- Parameters: {parameters}\n- Training: {updates} updates, 2 epochs\n- Validation loss: " in card
    edited = card.replace("Licence of the text: unknown to this program", "Licence of the text: public domain")
    (made.model / "README.md").write_text(edited, encoding="utf-8")
    own(*made.words)
    assert (made.model / "README.md").read_text(encoding="utf-8") == edited
    options = ["--data", made.out / "data-bin", "--sentencepiece-model", made.out / "subwords.model"]
    best, alone = made.model / "checkpoint_best.pt", tmp_path / "alone.pt"
    shutil.copy(best, alone)
    for name, words in (("out", [made.out]), ("best", [best, *options]), ("other", [alone, *options])):
        tool("export", words[0], tmp_path / name, *words[1:])
        readme = (tmp_path / name / "README.md").read_text(encoding="utf-8")
        assert "pip install numpy onnxruntime sentencepiece\n" in readme
        assert (edited.partition("\n## Commands\n")[0] in readme) == (name != "other")
        assert str(made.out) not in readme
    assert (tmp_path / "out" / "SHA256SUMS").read_text() == (tmp_path / "best" / "SHA256SUMS").read_text()


def test_wrong_exports_of_a_folder(made: SimpleNamespace, tmp_path: Path) -> None:
    best, data = made.model / "checkpoint_best.pt", made.out / "data-bin"
    for words, option in (
        ([made.out, "--data", data], "--data"),
        ([best, "--arch", "a"], "--arch"),
        ([made.out, "-s", "en"], "--source-lang"),
    ):
        assert f"error: {option}: " in refused("export", words[0], tmp_path / "no", *words[1:])
    (tmp_path / "settings").write_text("[]")
    assert f"{tmp_path}/settings" in refused("export", tmp_path, tmp_path / "no")


def test_the_preprocessing_of_a_folder_with_moses(tmp_path: Path) -> None:
    moses = Folder(tmp_path, ("en", "de"), "moses").preprocessing
    assert moses == {"bpe_codes": tmp_path / "code", "tokenizer": "moses", "sentencepiece_model": None}


def test_attention_of_a_folder(made: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The sentence is plain text, and is split into the same subwords as in training."""
    pytest.importorskip("matplotlib")
    tool("plot-attention", made.out, "--input", "A  dog, \u72ac.", "--output", tmp_path / "a.png")
    pieces = capsys.readouterr().out.splitlines()[0].removesuffix(" </s>").split(" ")
    assert "".join(pieces).startswith("\u2581A\u2581\u2581dog,\u2581")
    assert (tmp_path / "a.png").stat().st_size > 1000
    for words, option in (
        ([made.out, "--bpe-codes", made.folder / "test.en"], "--bpe-codes"),
        ([made.out, "--arch", "convs2s"], "--arch convs2s"),
        ([made.out / "data-bin"], "--path"),
    ):
        assert option in refused("plot-attention", *words, "--input", "A dog.", "--output", tmp_path / "a.png")


def test_letters_of_other_scripts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A font with the letters is found, even if matplotlib's list of fonts is older; otherwise a warning is printed."""
    font_manager = pytest.importorskip("matplotlib.font_manager")
    fonts, letter = font_manager.fontManager.ttflist, "\u1d81"  # in STIXGeneral, and not in DejaVu Sans
    (stix,) = (font.fname for font in fonts if (font.name, font.style, font.weight) == ("STIXGeneral", "normal", 400))
    monkeypatch.setattr(font_manager.fontManager, "ttflist", [font for font in fonts if font.name == "DejaVu Sans"])
    for others, named in (([], ["DejaVu Sans"]), ([stix], ["DejaVu Sans", "STIXGeneral"])):
        monkeypatch.setattr(font_manager, "findSystemFonts", lambda others=others: others)
        assert fonts_for(f"a {letter}") == named
        assert (letter in capsys.readouterr().err) == (not others)


def test_fairseq_interactive_prints_only_translations(made: SimpleNamespace) -> None:
    """With Python's default warnings, fairseq-interactive prints no warnings, configuration or log lines."""
    command = [sys.executable, "-m", "fairseq_cli.interactive", made.out / "data-bin", "-s", "en", "-t", "ja"]
    command += ["--user-dir", USER_DIR, "--path", made.model / "checkpoint_best.pt"]
    result = started([*map(str, command)], ROOT, {**os.environ, "PYTHONPATH": str(ROOT)}, b"A dog.\n")
    assert result.returncode == 0
    for chatter in ("Warning", "'_name'", "rebuild_batches", "hydra"):
        assert chatter not in result.stdout + result.stderr


def test_sacrebleus_tokenizer_by_language(monkeypatch: pytest.MonkeyPatch) -> None:
    for language, tokenizer in (("zh", "zh"), ("zh_CN", "zh"), ("zho_Hans", "zh"), ("th", "char"), ("pt-BR", "13a")):
        assert (score.tokenizer_for(language), score.missing_tokenizer(language)) == (tokenizer, None)
    for installed, tokenizer in ({"MeCab"}, "char"), ({"MeCab", "ipadic"}, "ja-mecab"):
        monkeypatch.setattr(common.text, "find_spec", lambda name, installed=installed: name in installed or None)
        assert score.tokenizer_for("ja-JP") == tokenizer
        assert (score.missing_tokenizer("ja") is None) == (tokenizer == "ja-mecab")
