"""``examples/multi30k/prepare.py`` on a few invented captions."""

from __future__ import annotations

import gzip
import subprocess
from pathlib import Path

from fairseq.data import Dictionary, indexed_dataset
from fairseq.data.encoders.moses_tokenizer import MosesTokenizer, MosesTokenizerConfig

from fairseq_plugins.cli.files import work_in
from tests.commands import ROOT, python

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


def test_other_captions_and_a_second_call(tmp_path: Path) -> None:
    """A second call with the same captions succeeds; other captions and concurrent calls are refused."""
    for data in ("a", "b"):
        (tmp_path / data).mkdir()
        for name in ("train", "val", "test_2016_flickr"):
            for language in ("en", "de"):
                (tmp_path / data / f"{name}.{language}").write_text(f"{data} {language} dog\n" * 40)
    out, options = tmp_path / "out", ["--merges", "3"]
    assert prepare(tmp_path / "a", out, *options).returncode == 0
    assert prepare(tmp_path / "a", out, *options).returncode == 0
    assert "has other text" in prepare(tmp_path / "b", out, *options).stderr
    with work_in(out):
        assert prepare(tmp_path / "a", out, *options).stderr.startswith(f"prepare.py: error: {out} is in use")
