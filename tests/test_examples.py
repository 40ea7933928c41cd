"""The scripts of the examples: usage, quickstart, captions, catalogues, variances, and pictures."""

from __future__ import annotations

import csv
import gzip
import os
import runpy
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fairseq.data import Dictionary, indexed_dataset
from fairseq.data.encoders.moses_tokenizer import MosesTokenizer, MosesTokenizerConfig

from tests.commands import ROOT, python, script

# The benchmark itself starts its contestants' scripts.
SCRIPTS = [
    path
    for path in sorted((ROOT / "examples").glob("*/*.py"))
    if "__main__" in path.read_text("utf-8") and not path.name.startswith("ctranslate2_")
]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_help(path: Path) -> None:
    result = script(path, "--help")
    assert result.returncode == 0
    name = path.parent.name if path.name == "__main__.py" else path.name  # a folder that Python runs
    assert result.stdout.startswith(f"usage: {name} ")


def test_the_quickstart_does_not_remove_other_files(tmp_path: Path) -> None:
    (tmp_path / "data-bin").mkdir()
    command = ["bash", str(ROOT / "examples" / "quickstart" / "run.sh")]
    result = subprocess.run(command, env={**os.environ, "OUT": str(tmp_path)}, capture_output=True, check=False)
    assert (result.returncode, result.stdout) == (2, b"")
    assert result.stderr.decode().startswith(f"OUT: {tmp_path} contains another data-bin")
    assert (tmp_path / "data-bin").exists()


def test_the_quickstart_runs_again_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for name in ("codes", "text/train.en", "log.txt"):
        (tmp_path / name).touch()
    command = ["bash", str(ROOT / "examples" / "quickstart" / "run.sh")]
    environment = {**os.environ, "OUT": str(tmp_path), "PATH": "/usr/bin:/bin", "ARCH": "none"}
    result = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert b"== 1. Data" in result.stdout
    assert not (tmp_path / "text" / "train.en").exists()


SPLIT = ROOT / "examples" / "documentation" / "split.py"


def test_documents_are_in_one_part_and_stay_there(tmp_path: Path) -> None:
    for number in range(30):
        path = tmp_path / "po" / f"{number % 3}" / f"{number}.po"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{number}")
    found = {}
    for out, more in (("one", ()), ("two", ("0/new.po", "new.po"))):
        for name in more:
            (tmp_path / "po" / name).write_text(name)
        result = python(SPLIT, tmp_path / "po", tmp_path / out, "--every", 5)
        assert result.returncode == 0, result.stderr
        copies = list((tmp_path / out).rglob("*.po"))
        found[out] = {path.read_text(): path.relative_to(tmp_path / out).parts[0] for path in copies}
        assert len(copies) == 30 + len(more)
        assert set(found[out].values()) == {"train", "valid", "test"}
    assert found["one"].items() <= found["two"].items()
    for folder, every, named in (("po", 2, "--every"), ("empty", 40, "empty")):
        (tmp_path / "empty").mkdir(exist_ok=True)
        result = python(SPLIT, tmp_path / folder, tmp_path / "none", "--every", every)
        assert named in result.stderr
        assert "Traceback" not in result.stderr
        assert not (tmp_path / "none").exists()


TEXTS = {"en": "A well-known man's dog, no {}.\n", "de": "Hund Nr. {} eines bekannten Mannes \u2013 da.\n"}


def prepare(*words: object) -> subprocess.CompletedProcess[str]:
    return python(ROOT / "examples" / "multi30k" / "prepare.py", *words)


def test_from_captions_to_numbers(tmp_path: Path) -> None:
    """The text is plain or gzipped; the numbers stand for fairseq's own tokens of the text."""
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    lines = {language: [text.format(number) for number in range(40)] for language, text in TEXTS.items()}
    for name in ("train", "val", "test_2016_flickr"):
        for language, text in lines.items():
            content = "".join(text).encode()
            path = data / f"{name}.{language}"
            if name == "val":
                path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(content))
            else:
                path.write_bytes(content)
    result = prepare(data, out, "--merges", "20", "--source-lang", "de")
    assert result.returncode == 0, result.stderr[-4000:]
    assert (out / "test.reference").read_text() == "".join(lines["en"])
    dictionary = Dictionary.load(str(out / "data-bin" / "dict.de.txt"))
    for part in ("train", "valid", "test"):
        for language, text in lines.items():
            tokenizer = MosesTokenizer(MosesTokenizerConfig(source_lang=language))
            numbers = indexed_dataset.make_dataset(str(out / "data-bin" / f"{part}.de-en.{language}"), impl="mmap")
            found = [dictionary.string(row, bpe_symbol="subword_nmt") for row in numbers]
            assert found == [tokenizer.encode(line.strip()) for line in text]


def test_captions_joined_to_long_lines(tmp_path: Path) -> None:
    """Captions are joined until there are enough words; a remainder at the end is dropped."""
    data = tmp_path / "data"
    data.mkdir()
    lengths = [3, 4, 2, 5, 9, 1]
    for name in ("train", "val", "test_2016_flickr"):
        for language in ("en", "de"):
            text = "".join(" ".join([f"{language}{number}"] * length) + "\n" for number, length in enumerate(lengths))
            (data / f"{name}.{language}").write_text(text)
    result = prepare(data, tmp_path / "out", "--merges", "5", "--join", 8)
    assert result.returncode == 0, result.stderr[-4000:]
    for part in ("train", "valid", "test"):
        for language in ("en", "de"):
            lines = (tmp_path / "out" / f"{part}.{language}").read_text().replace("@@ ", "").splitlines()
            joined = [[0, 1, 2], [3, 4]]
            assert lines == [" ".join(f"{language}{n}" for n in each for _ in range(lengths[n])) for each in joined]


Variances = dict[tuple[str, str], list[tuple[float, float]]]

AS_IT_IS = "as in the paper"
PLAIN = "encoder without residual connections"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Variances:
    """Return variances of activations and gradients for each stack and variant, from the input up, in narrow layers."""
    folder = tmp_path_factory.mktemp("variance")
    result = script(ROOT / "examples" / "variance" / "measure.py", folder, "--width", 64, "--length", 120)
    assert result.returncode == 0, result.stderr[-3000:]
    assert (folder / "variance.png").read_bytes().startswith(b"\x89PNG")
    found: Variances = {}
    with (folder / "variance.tsv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file, delimiter="\t"):
            found.setdefault((row["stack"], row["variant"]), []).append(
                (float(row["activations"]), float(row["gradients"]))
            )
    assert all(len(variances) == 21 for variances in found.values())
    return found


def spread(values: list[float]) -> float:
    return max(values) / min(values)


def test_variances(measured: Variances) -> None:
    """Twenty layers keep variances; in the decoder, the source gets a quarter of each layer's gradient."""
    for stack in ("encoder", PLAIN):
        for values in zip(*measured[stack, AS_IT_IS], strict=True):
            assert spread(list(values)) < 5
    activations, gradients = zip(*measured["decoder", AS_IT_IS], strict=True)
    assert spread(list(activations)) < 5
    assert 0.75**20 / 2 < gradients[0] / gradients[-1] < 0.1


@pytest.mark.parametrize(
    ("stack", "variant", "lost"),
    [
        ("encoder", "without √½", 1e6),
        ("encoder", "without the factor 4", 1e3),
        ("encoder", "without the factor p", 10),
        ("decoder", "without √½", 1e6),
        (PLAIN, "without the factor p", 1e3),
    ],
)
def test_variance_is_lost_without_a_factor(measured: Variances, stack: str, variant: str, lost: float) -> None:
    for values in zip(*measured[stack, variant], strict=True):
        assert spread(list(values)) > lost


FOLDER = ROOT / "examples" / "architectures"
PICTURES = ["convs2s", "weighted_transformer", "conv_encoder"]


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(FOLDER)
    return runpy.run_path(str(FOLDER / "draw.py"))["draw"]


@pytest.mark.parametrize("family", PICTURES)
def test_pictures_of_the_pages_are_up_to_date(draw: Callable[[str], Any], family: str) -> None:
    """matplotlib draws letters as outlines, and writes the words into comments."""
    picture = (ROOT / "docs" / f"{family}_architecture.svg").read_text("utf-8")
    paper, *_ = draw(f"{family}_iwslt_de_en")
    assert [label for label in paper.labels if f"<!-- {label} -->" not in picture] == []
    assert picture.count("<!-- ") == len(paper.labels)


def test_the_script_writes_a_picture(tmp_path: Path) -> None:
    result = script(FOLDER / "draw.py", "conv_encoder_tiny", tmp_path / "picture.png")
    assert result.returncode == 0, result.stderr[-3000:]
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
