"""Exported folders in use: text of any kind, the command line, and damaged files."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from fairseq.data import Dictionary
from fairseq.data.encoders.moses_tokenizer import MosesTokenizer, MosesTokenizerConfig
from fairseq.data.encoders.subword_nmt_bpe import SubwordNMTBPE, SubwordNMTBPEConfig

from fairseq_plugins.export import translate
from fairseq_plugins.vocabulary.candidates import Candidates
from tests.export.exporting import export, parts, update_checksums
from tests.searches import model

LINES = [
    "w1 w2 w3",
    "",
    "w4",
    " \t \u3000",
    "w5\u2028w6\x85w7",
    "w1\rw2",
    "w1\0 w2",
    "\ufffd w3",
    "w9 " * 300,
    "</s> <pad> w2",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, dictionary: Dictionary) -> Path:
    return made(tmp_path_factory.mktemp("exported") / "out", dictionary)


@pytest.fixture(scope="module")
def full_folder(tmp_path_factory: pytest.TempPathFactory, dictionary: Dictionary) -> Path:
    """Export a model with codes and candidates, whose steps attend to earlier steps."""
    path = tmp_path_factory.mktemp("exported")
    (path / "codes").write_text("#version: 0.2\nw 1</w>\n")
    tables = torch.arange(len(dictionary)).unsqueeze(1)
    return made(
        path / "out",
        dictionary,
        "weighted_transformer_tiny",
        codes=path / "codes",
        candidates=Candidates(tables, torch.ones(len(dictionary), dtype=torch.bool)),
    )


def made(path: Path, dictionary: Dictionary, architecture: str = "convs2s_tiny", **options: Any) -> Path:
    return export(model(architecture, 1, False).float(), path, dictionary, **options)


def run(
    folder: Path, *words: object, stdin: bytes = b"", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-I", folder / "translate.py", "--threads", 1, "--max-len-b", 30, *words]
    return subprocess.run(list(map(str, command)), input=stdin, capture_output=True, check=False, env=env)


def test_each_line_has_a_translation(folder: Path) -> None:
    """Each line has one translation, the same for the standard input, a file, small buffers and Python."""
    text = "\n".join(LINES).encode() + b"\nw1\xff w2"
    result = run(folder, stdin=text)
    assert result.returncode == 0, result.stderr.decode()
    translations = result.stdout.decode().split("\n")[:-1]
    assert len(translations) == len(LINES) + 1
    assert [line for line, text in zip(LINES, translations, strict=False) if not text] == ["", " \t \u3000"]
    assert "truncated from 300 to 63" in result.stderr.decode()
    assert re.findall(r"line (\d+) is not UTF-8", result.stderr.decode()) == ["11"]
    (folder.parent / "text").write_bytes(text)
    for words in (["--buffer", 0], ["--buffer", 2], ["--threads", 3, "--max-tokens", 10]):  # 0 counts as 1
        again = run(folder, *words, "--input", folder.parent / "text")
        assert (again.stdout, b"line 11 is not UTF-8" in again.stderr) == (result.stdout, True)
    translated = translate.Translator(folder, 1).translate([*LINES, "w1\ufffd w2"], max_len_b=30)
    assert translated == translations


@pytest.mark.parametrize(
    "text",
    [gzip.compress(b"w1\n"), codecs.BOM_UTF16_LE + b"w\0", codecs.BOM_UTF16_BE + b"\0w"],
    ids=["gzip", "le", "be"],
)
def test_input_that_is_not_utf_8_text(text: bytes, folder: Path, tmp_path: Path) -> None:
    result = run(folder, stdin=text)
    assert (result.returncode, result.stdout) == (1, b"")
    assert re.fullmatch(rb"translate\.py: error: the standard input .*UTF-8\n", result.stderr)
    (path := tmp_path / "text").write_bytes(text)
    assert run(folder, "--input", path).stderr.startswith(f"translate.py: error: --input {path} ".encode())


def test_nothing_is_left_in_the_home_folder(folder: Path, tmp_path: Path) -> None:
    """onnxruntime's telemetry would write a machine id and queued reports there."""
    result = run(folder, stdin=b"w1\n", env={**os.environ, "HOME": str(tmp_path)})
    assert (result.returncode, result.stderr, list(tmp_path.iterdir())) == (0, b"", [])


@pytest.mark.parametrize(
    ("streams", "error"),
    [("<&-", rb"closed"), (">&-", rb"closed"), (">/dev/full", rb"No space left"), ("2>&-", rb"")],
)
def test_closed_and_full_streams(streams: str, error: bytes, folder: Path) -> None:
    """The error is one line; with a closed stderr, the text is translated, with or without warnings."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = ["sh", "-c", f'exec "$0" -I "$1" {streams}', sys.executable, folder / "translate.py"]
    for text in (b"w1\n", b"\xe9\n"):
        result = subprocess.run(command, input=text, capture_output=True, check=False, env=environment)
        if error:
            assert result.returncode == 1
            assert re.search(rb"translate\.py: error: the standard output .*" + error + rb".*\n\Z", result.stderr)
        else:
            assert (result.returncode, result.stdout) == (0, run(folder, stdin=text).stdout)


def test_too_little_memory(folder: Path) -> None:
    """The error names options that reduce memory, not a file."""
    (folder.parent / "many").write_text("w1 w2 w3 w4 w5 w6 w7 w8 w9\n" * 9000)
    command = ["sh", "-c", 'ulimit -v 800000; exec "$0" "$@"', sys.executable, "-I", folder / "translate.py"]
    options = ["--threads", "1", "--max-tokens", "1000000", "--beam", "30", "--buffer", "9000"]
    result = subprocess.run(
        [*command, *options, "--input", folder.parent / "many"],
        capture_output=True,
        check=False,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # numpy's threads allocate memory for each core
    )
    assert result.returncode == 1
    message = r"translate\.py: error: out of memory: .*--max-tokens.*\n"
    assert re.fullmatch(message, result.stderr.decode()), result.stderr


def test_idle_threads_share_the_last_batches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a batch have the maximum length of the whole batch, so their results are the same."""
    lines = ["w1 " * length for length in (1, 2, 3, 5, 6, 6, 6, 7)]
    plain, calls = translate.Translator.batch, list[tuple[int, ...]]()

    def batch(self: Any, sources: Any, o: Any, *part: int) -> Any:
        calls.append((len(sources), *part))
        return plain(self, sources, o, *part)

    monkeypatch.setattr(translate.Translator, "batch", batch)
    alone, *shared = (
        translate.Translator(folder, 1, batches).explain(lines, max_len_a=1, max_len_b=0, min_len=5, max_tokens=32)
        for batches in (1, 2, 5, 9)
    )
    assert calls[:2] == [(4, 0, 1), (4, 0, 1)]
    assert sorted(calls[2:]) == [(4, 0, 1)] * 2 + [(4, 0, 2)] * 4 + [(4, 1, 2)] * 4
    assert shared == [alone] * 3


def test_an_error_in_one_of_several_batches(folder: Path) -> None:
    """The error is one line, and the process exits normally while other batches run."""
    words = ["--max-len-a", -1, "--max-len-b", 8, "--max-tokens", 30, "--threads", 4]
    result = run(folder, *words, stdin=b"w1 w2\n" * 40 + b"w1 w2 w3 w4 w5 w6 w7 w8 w9\n")
    assert (result.returncode, result.stdout) == (1, b"")
    assert re.fullmatch(r"translate\.py: error: no translation of 1 to -2 words .*\n", result.stderr.decode()), (
        result.stderr
    )


def test_an_interrupt_in_one_of_several_batches(folder: Path) -> None:
    """The process exits at once while other batches run."""
    command = [sys.executable, folder / "translate.py", "--buffer", "60", "--threads", "4", "--max-tokens", "30"]
    text = folder.parent / "long"
    text.write_text("w1 w2 w3 w4 w5\n" * 60 + "w1 w2 w3 w4\n" * 30_000)
    with subprocess.Popen([*command, "--input", text, "--min-len", "40"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # sixty translations are done, and the second sixty are in progress
        process.send_signal(signal.SIGINT)
        assert process.wait(5) == -signal.SIGINT


def test_a_reader_that_exits(folder: Path) -> None:
    """With a reader like `head -1`, the process exits silently."""
    (folder.parent / "many").write_text("w1 w2\n" * 1000)
    command = [sys.executable, folder / "translate.py", "--input", folder.parent / "many", "--buffer", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == -signal.SIGPIPE


def test_n_best(folder: Path) -> None:
    result = run(folder, "--nbest", 3, stdin=b"w1 w2\n\n")
    assert result.returncode == 0, result.stderr.decode()
    (best, blank) = translate.Translator(folder, 1).translate(["w1 w2", ""], nbest=3, max_len_b=30)
    assert result.stdout.decode().splitlines() == [f"{score:.4f}\t{text}" for text, score in best + blank]
    assert blank == [("", 0.0)] * 3
    assert [score for _, score in best] == sorted((score for _, score in best), reverse=True)


def test_nothing_but_numpy_and_onnxruntime(folder: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(folder)!r})
from translate import Translator
Translator({str(folder)!r}, 1).translate(["w1 w2"])
assert not {{"torch", "fairseq", "fairseq_plugins", "onnx", "subword_nmt", "sacremoses"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-I", "-c", code], check=True)


@pytest.mark.parametrize(
    "options",
    [{"beam": 0}, {"beam": 2, "nbest": 3}, {"beams": 5}, {"beam": 2.5}, {"lenpen": float("nan")}, {"max_tokens": 0},
     {"lenpen": 400.0}, {"lenpen": -11.0}, {"min_len": 70}, {"beam": 100}, {"replace_unk": "file.txt"}],
)  # fmt: skip
def test_invalid_options(options: dict[str, Any], folder: Path) -> None:
    with pytest.raises(ValueError, match=f"^({'|'.join(options)})\\b|^no translation .*--(min-len|beam)"):
        translate.Translator(folder, 1).translate(["w1"], **options)


def test_subwords_and_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moses tokens and subwords are those of fairseq in both directions; a very long word takes little time."""
    codes = tmp_path / "codes"
    codes.write_text("#version: 0.2\nt h\nth e</w>\n")
    words = Dictionary()
    for word in ("th@@", "e", "&apos;s", "a", "@-@", "x", "."):
        words.add_symbol(word)
    folder = made(tmp_path / "out", words, codes=codes, tokenizer="moses", languages=("en", "de"))
    translator = translate.Translator(folder, 1)
    moses = MosesTokenizer(MosesTokenizerConfig(source_lang="en", target_lang="de"))
    bpe = SubwordNMTBPE(SubwordNMTBPEConfig(bpe_codes=str(codes)))
    for line in ("The other's well-known  a-x. \n", "x\u2028 \u00e9&|[", "\0"):
        assert translator.words(line) == bpe.encode(moses.encode(line)).split()
    assert translator.words("x" * 2000) == ["x@@"] * 63
    numbers = [words.index(word) for word in ("th@@", "e", "&apos;s", "a", "@-@", "x", ".")]
    text = moses.decode(bpe.decode(words.string(numbers)))
    assert translator.text(([[number, 0] for number in numbers], -1.5), [], None) == (text, -1.5)
    monkeypatch.setattr(translate, "CACHED", 90)
    for number in range(100):
        translator.words(f"x{number}")
    assert len(translator.bpe.cache) <= 90, "the memory of a server grows with each new word"


def spoil(path: Path, chance: random.Random) -> str:
    """Damage a file accidentally or maliciously, and describe the damage."""
    content, kind = (
        bytearray(path.read_bytes()),
        chance.choice(["bit", "cut", "grow", "zeros", "gone", "other", "folder"]),
    )
    at = chance.randrange(len(content))
    if kind == "bit":
        content[at] ^= 1 << chance.randrange(8)
    elif kind == "cut":
        del content[at:]
    elif kind == "grow":
        content[at:at] = chance.randbytes(chance.randint(1, 9))
    elif kind == "zeros":
        content[at:] = bytes(len(content) - at) if any(content[at:]) else b"\1"
    elif kind == "other":
        others = [each for each in parts(path.parent) if each.read_bytes() != content]
        content = bytearray(chance.choice(others).read_bytes())
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind != "gone":
        path.write_bytes(content)
    return f"{path.name}: {kind} at {at}"


def check_spoiled(number: int, whole: Path, place: Path) -> None:
    """A folder with a spoiled file, half of the time with matching checksums, translates or raises a clear error."""
    chance = random.Random(number)
    shutil.copytree(whole, place)
    damage = spoil(chance.choice(parts(place)), chance)
    hidden = chance.random() < 0.5
    if hidden:
        update_checksums(place)
    message = None
    try:
        translate.Translator(place, 1).translate(["w1 w2", "w3"], max_len_b=5)
    except ValueError as error:
        message = str(error)
    assert hidden if message is None else re.fullmatch(r"[^\n]*\S[^\n]*", message), (damage, message)
    shutil.rmtree(place)


@pytest.mark.parametrize("number", range(40))
def test_spoiled_files(number: int, folder: Path, full_folder: Path, tmp_path: Path) -> None:
    check_spoiled(number, (folder, full_folder)[number % 2], tmp_path / "spoiled")


@pytest.mark.parametrize(
    ("name", "output"), [("source.onnx", "source0"), ("step.onnx", "scores"), ("step.onnx", "new0")]
)
def test_programs_with_other_output_names(name: str, output: str, full_folder: Path, tmp_path: Path) -> None:
    """The programs do not fit together, although all checksums match."""
    place = shutil.copytree(full_folder, tmp_path / "out")
    graph = onnx.load(place / name, load_external_data=False)
    next(each for each in graph.graph.output if each.name == output).name = "other"
    next(node for node in graph.graph.node if output in node.output).output[0] = "other"
    (place / name).write_bytes(graph.SerializeToString())
    update_checksums(place)
    with pytest.raises(ValueError, match=r"step\.onnx: "):
        translate.Translator(place, 1).translate(["w1 w2"])


@pytest.mark.parametrize(
    "content", ["[" * 100_000, "[1]", "", '{"format": ' + "9" * 5000 + "}", '{"format": NaN}'], ids=range(5)
)
def test_hostile_config(content: str, folder: Path, tmp_path: Path) -> None:
    check_config(content, folder, tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("pad", -1), ("eos", 10**6), ("unk", "3"), ("bos", None), ("source_words", 7), ("target_words", True),
     ("inputs", {}), ("languages", ["a", 1]), ("tokenizer", "moses"), ("bpe_separator", 5), ("format", 1),
     ("candidates", True), ("target_positions", 1.5)],
)  # fmt: skip
def test_wrong_config(name: str, value: object, folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    check_config(json.dumps({**config, name: value}), folder, tmp_path)
    del config[name]
    shutil.rmtree(tmp_path / "out")
    check_config(json.dumps(config), folder, tmp_path)


def check_config(content: str, folder: Path, tmp_path: Path) -> None:
    """Check that the error is one line, with and without matching checksums."""
    out = shutil.copytree(folder, tmp_path / "out")
    sums = out / "SHA256SUMS"
    before = hashlib.sha256((out / "config.json").read_bytes()).hexdigest()
    (out / "config.json").write_text(content)
    for matches in (False, True):
        if matches:
            sums.write_text(sums.read_text().replace(before, hashlib.sha256(content.encode()).hexdigest()))
        with pytest.raises(ValueError, match=r"\A[^\n]+\Z"):
            translate.Translator(out, 1).translate(["w1"])


@pytest.mark.parametrize("name", ["SHA256SUMS", "config.json"])
def test_a_pipe_in_a_folder_does_not_block(folder: Path, tmp_path: Path, name: str) -> None:
    out = shutil.copytree(folder, tmp_path / "out")
    (out / name).unlink()
    os.mkfifo(out / name)
    with pytest.raises(ValueError, match=name):
        translate.Translator(out, 1)


def test_a_mapping_that_the_system_refuses_is_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Systems word this error differently."""
    assert (translate.new_memory(3) == [0] * 12).all()

    def refuse(*_: object) -> None:
        raise OSError(12, "Out of memory")

    monkeypatch.setattr(translate.mmap, "mmap", refuse)
    with pytest.raises(MemoryError):
        translate.new_memory(3)
