"""Reading and tokenising text, compared with other libraries and with plain Python."""

from __future__ import annotations

import gzip
import os
import random
import signal
import subprocess
import sys
import time
from argparse import Namespace
from contextlib import suppress
from pathlib import Path

import pytest
from fairseq.data.encoders.subword_nmt_bpe import SubwordNMTBPE
from sacrebleu.dataset.fake_sgml import FakeSGMLDataset
from subword_nmt.apply_bpe import BPE

from fairseq_plugins.cli import parallel_text
from fairseq_plugins.common.text import LONGEST, segment


def test_test_sets_are_read_as_sacrebleu_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "newstest-src.en.sgm"
    path.write_text(
        '<srcset setid="x">\n<doc>\n<p>\n<seg id="1">A “word”  &amp; more.</seg>\n<seg id="2"> two\u2028lines </seg>\n'
        "</p>\n<seg id='3'></seg>\n</doc></srcset>\n",
        encoding="utf-8",
    )
    reader = FakeSGMLDataset("x", data=[], description="", citation="", md5=[], langpairs={})
    reader._convert_format(str(path), str(tmp_path / "plain"))
    ours = list(parallel_text.read_text(path, "en"))
    assert len(ours) == 3
    assert ours == (tmp_path / "plain").read_text(encoding="utf-8").removesuffix("\n").split("\n")


def test_formats(tmp_path: Path) -> None:
    unit = "<tu><tuv xml:lang='en'><seg>one <b>x</b>\n two</seg></tuv><tuv xml:lang='RO'><seg>unu</seg></tuv></tu>"
    tmx = f"<tmx><body>{unit}<tu><tuv xml:lang='ro'/></tu></body></tmx>"
    (tmp_path / "a.tmx.gz").write_bytes(gzip.compress(tmx.encode()))
    assert list(parallel_text.read_text(tmp_path / "a.tmx.gz", "ro")) == ["unu", ""]
    (tmp_path / "b.tmx").write_text(tmx.replace("'en'", "'en-US'"))
    for language in ("en", "EN", "en-us", "en-US"):
        assert list(parallel_text.read_text(tmp_path / "b.tmx", language)) == ["one x two", ""]
    code = "Press <bpt i='1'>&lt;b&gt;</bpt>OK<ept i='1'>&lt;/b&gt;</ept><ph>{1}</ph>."
    old = f"<tmx xmlns='x'><body><tu><tuv lang='EN_GB'><seg>{code}</seg></tuv></tu></body></tmx>"
    (tmp_path / "old.TMX").write_text(old)
    assert list(parallel_text.read_text(tmp_path / "old.TMX", "en")) == ["Press OK."]
    (tmp_path / "train.tags.de-en.de").write_text(
        "<url>u</url>\n<title>Ein Titel</title>\n Satz. \n<talkid>1</talkid>\n"
    )
    assert list(parallel_text.read_text(tmp_path / "train.tags.de-en.de", "de")) == ["Ein Titel", " Satz. "]
    (tmp_path / "odd.en").write_bytes("\ufeffa\x85b\r\n\ufeffc\u2028d\n".encode())
    assert list(parallel_text.read_text(tmp_path / "odd.en", "en")) == ["a\x85b", "\ufeffc\u2028d"]
    rot13 = b"<?xml version='1.0' encoding='rot13'?><tmx/>"
    for name, content in (("bad.en", b"\xff"), ("bad.gz", b"plain"), ("bad.tmx", b"<tmx>"), ("rot.tmx", rot13)):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=name):
            list(parallel_text.read_text(tmp_path / name, "en"))


@pytest.mark.parametrize("line", ["<seg " * 40_000, "<seg>" * 40_000])
def test_many_beginnings_of_a_sentence_take_little_time(line: str, tmp_path: Path) -> None:
    path = tmp_path / "test.sgm"
    path.write_text(f"{line}\n<seg id='1'> a  b </seg> <seg>c</seg>\n<seg\n")
    began = time.process_time()
    assert list(parallel_text.read_text(path, "en")) == ["a b"]
    assert time.process_time() - began < 0.5


def test_tokens_are_those_of_fairseq_for_any_number_of_workers() -> None:
    from fairseq.data.encoders.moses_tokenizer import MosesTokenizer, MosesTokenizerConfig  # noqa: PLC0415

    lines = ["Well-known: it's 5 o'clock \u2013 \u201cnow\u201d & here.", "", "a\u2028b\tc"] * 3
    expected = [MosesTokenizer(MosesTokenizerConfig(source_lang="en")).encode(line) for line in lines]
    assert list(map(parallel_text.moses("en"), lines)) == expected
    assert list(parallel_text.each_line(_english, lines, 2)) == expected


def test_a_killed_worker_is_an_error() -> None:
    """The operating system may kill a worker if memory runs out."""
    with pytest.raises(ValueError, match="--workers"):
        list(parallel_text.each_line(_killed, ["a"] * 9, 2))


def test_workers_end_with_their_parent() -> None:
    """A parent may be killed while its workers hold an inherited lock."""
    code = "from fairseq_plugins.cli.parallel_text import each_line\n"
    code += "for _ in each_line(lambda: str, (str(number) for number in range(10**9)), 2): print()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
        try:
            process.communicate(timeout=30)  # returns when all processes have closed their output
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _killed() -> parallel_text.Line:
    return lambda _: str(os.kill(os.getpid(), signal.SIGKILL))


def _english() -> parallel_text.Line:
    return parallel_text.moses("en")


def test_letters_have_no_bpe(tmp_path: Path) -> None:
    (tmp_path / "letters").write_text("a b c\nb\n", encoding="utf-8")
    with pytest.raises(ValueError, match="letters"):
        parallel_text.learn_codes([tmp_path / "letters"] * 2, 9, tmp_path / "codes")
    assert not (tmp_path / "codes").exists()


def test_entities_hold_no_files_and_no_bombs(tmp_path: Path) -> None:
    """Entities that a file defines stay plain text."""
    (tmp_path / "secret").write_text("secret")
    ten = "".join(f"<!ENTITY e{n + 1} '{f'&e{n};' * 10}'>" for n in range(9))
    path, unit = tmp_path / "a.tmx", "<tmx><tu><tuv xml:lang='en'><seg>{}</seg></tuv></tu></tmx>"
    path.write_text(f"<!DOCTYPE tmx [<!ENTITY e0 'one'>{ten}]>{unit.format('&e1;')}")
    assert list(parallel_text.read_text(path, "en")) == ["one" * 10]
    for text in (
        f"<!DOCTYPE tmx [<!ENTITY e0 'one'>{ten}]>{unit.format('&e9;')}",
        f"<!DOCTYPE tmx [<!ENTITY e SYSTEM '{tmp_path}/secret'>]>{unit.format('&e;')}",
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"a\.tmx"):
            list(parallel_text.read_text(path, "en"))


@pytest.mark.parametrize(
    "content", ["", "more than two words\n", "#version: 0.2\na\n", "#version: 9.9\na b\n", "#version:\n", "\udcff"]
)
def test_the_error_names_a_file_without_codes(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """subword-nmt itself would print a message and exit."""
    (tmp_path / "codes").write_text(content, errors="surrogateescape")
    with pytest.raises(ValueError, match="codes "):
        parallel_text.segmenter(tmp_path / "codes")
    assert capsys.readouterr().err == ""


LETTERS = "abcdefghijklmnop"


@pytest.fixture(scope="module")
def codes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Learn codes from words with a long word among them."""
    folder = tmp_path_factory.mktemp("codes")
    random.seed(1)
    words = ["".join(random.choices(LETTERS, k=random.randint(2, 9))) for _ in range(200)]
    text = "\n".join(" ".join(random.choices(words, k=10)) for _ in range(500)) + "\n"
    for name, more in (("plain", ""), ("code", f"{words[0]} {'xyz' * 50_000} {words[0]}\n")):
        (folder / "text").write_text(text + (more or f"{words[0]} {words[0]}\n"))
        parallel_text.learn_codes([folder / "text"], 100, folder / name)
    assert (folder / "plain").read_text() == (folder / "code").read_text()
    return folder / "code"


@pytest.mark.parametrize(
    "line", ["", " ", "abc  dog ", "hide " * LONGEST, "f" * LONGEST, f" a {'abcdefghijk' * LONGEST} b"]
)
def test_long_words_do_not_change_other_words(line: str, codes: Path) -> None:
    """subword-nmt alone segments the short words; removing the separators restores the text."""
    with codes.open(encoding="utf-8") as file:
        bpe = BPE(file)
    ours, fairseq_s = parallel_text.segmenter(codes), SubwordNMTBPE(Namespace(bpe_codes=str(codes), bpe_separator="@@"))
    found = ours(line)
    assert found == fairseq_s.encode(line) == segment(bpe, line)
    assert found.replace("@@ ", "").split() == line.split()
    if max(map(len, line.split(" "))) <= LONGEST:
        assert found == bpe.process_line(line)
