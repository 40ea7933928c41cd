"""The scripts of the examples: usage, quickstart, captions, catalogues, variances, and pictures."""

from __future__ import annotations

import csv
import gzip
import os
import runpy
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fairseq.data import Dictionary, indexed_dataset
from fairseq.data.encoders.moses_tokenizer import MosesTokenizer, MosesTokenizerConfig

from tests.commands import ROOT, script

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


def quickstart(out: Path) -> subprocess.CompletedProcess[bytes]:
    """Run the quickstart, which ends at its first command in Python, because the PATH has no package."""
    environment = {**os.environ, "OUT": str(out), "PATH": "/usr/bin:/bin", "ARCH": "none"}
    command = ["bash", ROOT / "examples" / "quickstart" / "run.sh"]
    return subprocess.run(command, env=environment, capture_output=True, check=False)


def test_the_quickstart_removes_only_its_own_files(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    (own / "text").mkdir(parents=True)
    for name in ("codes", "text/train.en", "log.txt"):
        (own / name).touch()
    assert b"== 1. Data" in quickstart(own).stdout
    assert not (own / "text" / "train.en").exists()
    (other / "data-bin").mkdir(parents=True)
    refused = quickstart(other)
    assert (refused.returncode, refused.stdout) == (2, b"")
    assert refused.stderr.startswith(f"OUT: {other}".encode())
    assert (other / "data-bin").exists()


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
        result = script(SPLIT, tmp_path / "po", tmp_path / out, "--every", 5)
        assert result.returncode == 0, result.stderr
        copies = list((tmp_path / out).rglob("*.po"))
        found[out] = {path.read_text(): path.relative_to(tmp_path / out).parts[0] for path in copies}
        assert len(copies) == 30 + len(more)
        assert set(found[out].values()) == {"train", "valid", "test"}
    assert found["one"].items() <= found["two"].items()
    for folder, every, named in (("po", 2, "--every"), ("empty", 40, "empty")):
        assert named in script(SPLIT, tmp_path / folder, tmp_path / "none", "--every", every).stderr
        assert not (tmp_path / "none").exists()
    for out in ("po", "po/copies"):
        assert f"{tmp_path / out} is in {tmp_path / 'po'}" in script(SPLIT, tmp_path / "po", tmp_path / out).stderr


TEXTS = {"en": "A well-known man's dog, no {}.\n", "de": "Hund Nr. {} eines bekannten Mannes \u2013 da.\n"}


def prepare(folder: Path, texts: dict[str, list[str]], *options: object) -> Path:
    """Prepare captions, some of them gzipped, and return the folder of the results."""
    data, out = folder / "data", folder / "out"
    data.mkdir()
    for language, lines in texts.items():
        content = "".join(lines).encode()
        for name in ("train", "test_2016_flickr"):
            (data / f"{name}.{language}").write_bytes(content)
        (data / f"val.{language}.gz").write_bytes(gzip.compress(content))
    result = script(ROOT / "examples" / "multi30k" / "prepare.py", data, out, *options)
    assert result.returncode == 0, result.stderr[-4000:]
    return out


def test_from_captions_to_numbers(tmp_path: Path) -> None:
    """The numbers stand for fairseq's own tokens of the text."""
    lines = {language: [text.format(number) for number in range(40)] for language, text in TEXTS.items()}
    out = prepare(tmp_path, lines, "--merges", 20, "--source-lang", "de")
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
    texts = {side: [" ".join([f"{side}{n}"] * length) for n, length in enumerate((3, 4, 2, 5, 9, 1))] for side in TEXTS}
    lines = {side: [f"{line}\n" for line in text] for side, text in texts.items()}
    out = prepare(tmp_path, lines, "--merges", 5, "--join", 8)
    for part in ("train", "valid", "test"):
        for side, text in texts.items():
            joined = (out / f"{part}.{side}").read_text().replace("@@ ", "").splitlines()
            assert joined == [" ".join(text[:3]), " ".join(text[3:5])]


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


def spread(values: Sequence[float]) -> float:
    return max(values) / min(values)


def test_twenty_layers_keep_variances(measured: Variances) -> None:
    """In the decoder, the source gets a quarter of each layer's gradient."""
    for stack in ("encoder", PLAIN):
        assert all(spread(values) < 5 for values in zip(*measured[stack, AS_IT_IS], strict=True))
    activations, gradients = zip(*measured["decoder", AS_IT_IS], strict=True)
    assert spread(activations) < 5
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
        assert spread(values) > lost


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
