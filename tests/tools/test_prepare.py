"""Downloading, reading, cleaning and the order of steps, beside what other libraries and plain Python make of it."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from sacrebleu.dataset.fake_sgml import FakeSGMLDataset

from fairseq_plugins.tools import cli, corpus, parallel_text
from fairseq_plugins.tools import download as downloads
from fairseq_plugins.tools.corpora import CORPORA
from fairseq_plugins.tools.corpus import Corpus, prepare
from fairseq_plugins.tools.download import download
from fairseq_plugins.tools.originals import fetch, text

CONTENT = bytes(range(256)) * 1000
SHA256 = "sha256:" + hashlib.sha256(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves ``files``; with ``breaks`` it hangs up half-way, and without ``ranges`` it always sends all.

    Without ``sizes`` it sends a part, of a length that it tells before it.
    """

    files: dict[str, bytes]
    breaks = False
    ranges = True
    sizes = True
    asked: list[str | None]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        content, wanted = self.server.files.get(self.path), self.headers.get("Range")
        self.server.asked.append(wanted)
        if content is None:
            self.send_error(404)
            return
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and self.server.ranges else 0
        if start >= len(content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(content)}")
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        if not self.server.sizes:
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"100000\r\n" + content[: len(content) // 2])
            return
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start : len(content) // 2 if self.server.breaks else None])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as server:
        server.files, server.asked = {"/file.bin": CONTENT}, []
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def url(server: Server, name: str = "file.bin") -> str:
    return f"http://127.0.0.1:{server.server_port}/{name}"


def test_a_part_that_breaks_off(server: Server, tmp_path: Path) -> None:
    server.sizes = False
    with pytest.raises(OSError, match="IncompleteRead"):
        download(url(server), tmp_path / "file.bin", SHA256)


def test_a_miniature_is_not_taken_for_the_corpus(tmp_path: Path) -> None:
    """Also where both are of words, so that nothing else tells them apart."""
    own = Corpus("xx", "yy", train=text("train.{}", ("xx", "yy")), tests=(), merges=None, terms="Ask somebody.")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CORPORA, "convs2s", own)
        cli.main(["prepare", "convs2s", str(tmp_path / "out"), "--smoke"])
        with pytest.raises(SystemExit, match="holds other text"):
            cli.main(["prepare", "convs2s", str(tmp_path / "out")])


@pytest.mark.parametrize("ranges", [True, False])
def test_a_download_goes_on_where_it_broke_off(server: Server, tmp_path: Path, ranges: bool) -> None:
    path, server.breaks, server.ranges = tmp_path / "file.bin", True, ranges
    with pytest.raises(OSError, match=f"broke off after {len(CONTENT) // 2} of {len(CONTENT)} bytes"):
        download(url(server), path, SHA256)
    assert not path.exists()
    server.breaks = False
    download(url(server), path, SHA256)
    assert path.read_bytes() == CONTENT
    download(url(server), path, SHA256)  # is there
    assert server.asked == [None, f"bytes={len(CONTENT) // 2}-"]


def test_a_wrong_file_is_refused_and_not_continued(server: Server, tmp_path: Path) -> None:
    server.files["/file.bin"] = CONTENT[:-1] + b"x"
    with pytest.raises(ValueError, match=SHA256.removeprefix("sha256:")):
        download(url(server), tmp_path / "file.bin", SHA256)
    assert list(tmp_path.iterdir()) == []
    server.files["/file.bin"] = CONTENT
    download(url(server), tmp_path / "file.bin", SHA256)
    with pytest.raises(OSError, match="404"):
        download(url(server, "nothing"), tmp_path / "nothing")
    nobody = "http://127.0.0.1:1/file.bin"
    with pytest.raises(OSError, match=f"{nobody} to .*refused"):
        download(nobody, tmp_path / "nothing")


def test_a_download_that_was_stopped_at_its_very_end(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.bin.partial").write_bytes(CONTENT)
    download(url(server), tmp_path / "file.bin", SHA256)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


def test_what_is_longer_than_the_file_is_none_of_it(server: Server, tmp_path: Path) -> None:
    """As two processes have left it that wrote one file; also where there is no sum."""
    (tmp_path / "file.bin.partial").write_bytes(CONTENT + b"more")
    download(url(server), tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


def test_one_download_of_a_file_at_a_time(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = downloads._fetch

    def meanwhile(*words: object) -> int | None:
        with pytest.raises(ValueError, match=r"another call is downloading .*/file\.bin"):
            download(url(server), tmp_path / "file.bin")
        return fetch(*words)

    monkeypatch.setattr(downloads, "_fetch", meanwhile)
    download(url(server), tmp_path / "file.bin", SHA256)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


@pytest.mark.parametrize("error", [TimeoutError("timed out"), ConnectionResetError("reset by peer")])
def test_what_breaks_off_is_named(server: Server, error: OSError, tmp_path: Path, monkeypatch) -> None:
    def broken(*_: object) -> bytes:
        raise error

    monkeypatch.setattr("http.client.HTTPResponse.read", broken)
    with pytest.raises(OSError, match=f"{url(server)} to .*: {error}"):
        download(url(server), tmp_path / "file.bin")


def archive(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def small(server: Server, **options: object) -> Corpus:
    """A training text in an archive, and a test text by itself."""
    rows = [f"word{number % 7} tail {number}" for number in range(60)]
    lines = "".join(row + "\n" for row in rows).encode()
    server.files["/train.tgz"] = archive({"./in/train.en": lines, "in/train.de": lines.upper(), "../evil": b"x"})
    for language in ("en", "de"):
        server.files[f"/test.{language}"] = lines
    train = text("in/train.{}", ("en", "de"), url(server, "train.tgz"))
    tests = (text("test.{}", ("en", "de"), url(server, "test.{}")),)
    return Corpus("en", "de", train=train, tests=tests, tokenise={}, merges=20, valid_every=10, **options)  # type: ignore[arg-type]


def test_archives_of_one_name(server: Server, tmp_path: Path) -> None:
    """As wmt15/test.tgz and wmt13/test.tgz; also when one of them has been unpacked."""
    texts = {}
    for folder in ("wmt13", "wmt15"):
        server.files[f"/{folder}/test.tgz"] = archive({f"{folder}.en": folder.encode(), f"{folder}.de": b"x"})
        texts[folder] = text(folder + ".{}", ("en", "de"), url(server, f"{folder}/test.tgz"))
    corpus = Corpus("en", "de", train=texts["wmt13"], tests=(texts["wmt15"],))
    for missing in ("wmt13.en", "wmt15.en"):
        fetch([*corpus.files()], tmp_path)
        assert {path.name for path in tmp_path.glob("*.tgz")} == {"wmt13-test.tgz", "wmt15-test.tgz"}
        assert [(tmp_path / f"{folder}.en").read_text() for folder in texts] == list(texts)
        (tmp_path / missing).unlink()


def test_only_what_is_missing_is_fetched(server: Server, tmp_path: Path) -> None:
    described = small(server)
    orig = tmp_path / "orig"
    (orig).mkdir()
    (orig / "test.en").write_text("mine\n")
    fetch([*described.files()], orig)
    assert (orig / "test.en").read_text() == "mine\n"
    assert (orig / "in" / "train.de").read_text().startswith("WORD0 TAIL 0\n")
    assert len(server.asked) == 2  # the archive once, and test.de
    assert (orig / "train.tgz").exists()
    assert not (tmp_path / "evil").exists()
    fetch([*described.files()], orig)
    assert len(server.asked) == 2
    server.files["/train.tgz"] = archive({"in/train.en": b""})
    with pytest.raises(ValueError, match=r"does not hold in/train\.de"):
        fetch([*described.files()], tmp_path / "other")


def test_an_interrupted_preparation_goes_on(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped within each step in turn; the text is the same as without a stop, and no finished step is repeated."""
    described = small(server)
    monkeypatch.setattr(corpus, "binarise", lambda *arguments: arguments[2].mkdir())
    prepare(described, tmp_path / "straight", tmp_path / "straight" / "orig")

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    steps = ["tokenise", "clean_and_split", "segment", "binarise"]
    out = tmp_path / "stopped"
    for step in steps:
        with monkeypatch.context() as patch:
            patch.setattr(corpus, step, stop)
            with pytest.raises(KeyboardInterrupt):
                prepare(described, out, out / "orig")
    before = {path: path.stat().st_ino for path in out.rglob("*.en") if path.parent != out / "orig"}
    (out / "train.en").rename(out / "train.en.partial")  # as if the segmentation of this file had been stopped
    prepare(described, out, out / "orig")
    again = {path.relative_to(out).as_posix() for path, inode in before.items() if path.stat().st_ino != inode}
    assert again <= {"train.en", "tmp/test.en"}
    names = sorted(path.relative_to(out) for path in out.rglob("*") if path.is_file() and path.suffix != ".partial")
    made = {"code", "train.en", "valid.de", "test.de", "tmp/valid.en", "test.reference"}
    assert {str(name) for name in names} >= made
    for name in names:
        assert (out / name).read_bytes() == (tmp_path / "straight" / name).read_bytes(), name
    with pytest.raises(ValueError, match="prepared otherwise"):
        prepare(small(server, max_words=9), out, out / "orig")


def test_other_text_under_the_same_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without sums of its own; a project may be moved, without its texts too, and one of a former version goes on."""
    monkeypatch.setattr(corpus, "binarise", lambda *arguments: arguments[2].mkdir())
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for language in ("en", "de"):
            (tmp_path / name / f"text.{language}").write_text(f"word {name}\n" * 40)
    texts = text("text.{}", ("en", "de"))
    described, out = Corpus("en", "de", train=texts, tests=(texts,), valid_every=10, merges=2), tmp_path / "out"
    binary = prepare(described, out, tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "moved")
    (tmp_path / "moved" / "text.en.gz").write_bytes(gzip.compress((tmp_path / "moved" / "text.en").read_bytes()))
    (tmp_path / "moved" / "text.en").unlink()
    for orig in ("moved", "gone"):
        assert prepare(described, out, tmp_path / orig) == binary
    (tmp_path / "moved" / "text.en").write_text("word a\n" * 40)
    with pytest.raises(ValueError, match="holds other text"):
        prepare(described, out, tmp_path / "b")
    with pytest.raises(ValueError, match="prepared otherwise"):
        prepare(replace(described, max_words=9), out, tmp_path / "moved")
    (out / "settings").write_text(f"{described}\n")
    binary.rmdir()
    for _ in range(2):
        assert prepare(described, out, tmp_path / "moved") == binary
    assert (out / "settings").read_text() == f"{described}\n", "which texts the tokens are of is not known"


def test_every_nth_pair_is_held_out_and_none_is_lost(server: Server, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(corpus, "binarise", lambda *arguments: arguments[2].mkdir())
    prepare(small(server), tmp_path, tmp_path / "orig")
    train, valid = ((tmp_path / "tmp" / f"{part}.en").read_text().splitlines() for part in ("train", "valid"))
    original = (tmp_path / "orig" / "in" / "train.en").read_text().splitlines()
    assert valid == original[9::10]
    assert sorted(train + valid) == sorted(original)
    restored = (tmp_path / "train.de").read_text().replace("@@ ", "")
    assert restored == (tmp_path / "tmp" / "train.de").read_text()


def test_the_papers_filters() -> None:
    lengths = [(175, 175), (176, 3), (3, 176), (2, 3), (3, 2), (2, 4), (0, 1), (1, 0)]
    pairs = [(" ".join("a" * source), " ".join("b" * target)) for source, target in lengths]
    kept = [(len(s.split()), len(t.split())) for s, t in parallel_text.clean(pairs, 175, None)]
    assert kept == [(175, 175), (2, 3), (3, 2), (2, 4)]
    kept = [(len(s.split()), len(t.split())) for s, t in parallel_text.clean(pairs, 175, 1.5)]
    assert kept == [(175, 175), (2, 3), (3, 2)]


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
    assert list(parallel_text.read_text(tmp_path / "a.tmx.gz", "en")) == ["one x two", ""]
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
    (tmp_path / "odd.en").write_bytes("a\x85b\r\nc\u2028d\n".encode())
    assert list(parallel_text.read_text(tmp_path / "odd.en", "en")) == ["a\x85b", "c\u2028d"]
    for name, content in (("bad.en", b"\xff"), ("bad.gz", b"plain"), ("bad.tmx", b"<tmx>")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=name):
            list(parallel_text.read_text(tmp_path / name, "en"))


@pytest.mark.parametrize("line", ["<seg " * 40_000, "<seg>" * 40_000, "<seg" * 10_000 + ">" + "</seg" * 10_000])
def test_many_beginnings_of_a_sentence_take_no_time(line: str, tmp_path: Path) -> None:
    path = tmp_path / "test.sgm"
    path.write_text(f"{line}\n<seg id='1'> a  b </seg> <seg>c</seg>\n<seg\n")
    began = time.process_time()
    assert list(parallel_text.read_text(path, "en")) == ["a b"]
    assert time.process_time() - began < 0.5


def test_a_byte_order_mark_is_no_part_of_a_word(tmp_path: Path) -> None:
    (tmp_path / "train.en").write_text("a\n\ufeffb\n", encoding="utf-8-sig")
    assert list(parallel_text.read_text(tmp_path / "train.en", "en")) == ["a", "\ufeffb"]


def test_punctuation_is_brought_into_one_form_in_training_alone(server: Server, tmp_path: Path, monkeypatch) -> None:
    described = small(server, normalise=True)
    monkeypatch.setattr(corpus, "binarise", lambda *arguments: arguments[2].mkdir())
    orig = tmp_path / "orig"
    fetch([*described.files()], orig)
    for path in (orig / "in" / "train.en", orig / "test.en"):
        path.write_text(path.read_text().replace("tail", "\u201etail\u201c"))
    prepare(described, tmp_path, orig)
    found = ["&quot;" in (tmp_path / "tmp" / f"{part}.en").read_text() for part in ("train", "test")]
    assert found == [True, False]


def test_what_would_be_written_over_is_in_the_way(server: Server, tmp_path: Path) -> None:
    for name in ("code", "data-bin", "train.en", "valid.de", "test.reference", "tmp"):
        out = tmp_path / name
        out.mkdir()
        (out / name).write_text("mine")
        with pytest.raises(ValueError, match=f"{name} is in the way of what is to be made"):
            prepare(small(server), out, tmp_path / "orig")


def test_tokens_are_those_of_fairseq_whatever_the_number_of_workers() -> None:
    from fairseq.data.encoders.moses_tokenizer import MosesTokenizer, MosesTokenizerConfig  # noqa: PLC0415

    lines = ["Well-known: it's 5 o'clock \u2013 \u201cnow\u201d & here.", "", "a\u2028b\tc"] * 3
    expected = [MosesTokenizer(MosesTokenizerConfig(source_lang="en")).encode(line) for line in lines]
    assert list(map(parallel_text.moses("en"), lines)) == expected
    assert list(parallel_text.each_line(_english, lines, 2)) == expected
    assert parallel_text.moses("en", dashes=False, lowercase=True)("Well-known X") == "well-known x"


def test_a_worker_that_is_killed_is_not_waited_for() -> None:
    """As by the system, where memory ends."""
    with pytest.raises(ValueError, match="was killed; if memory had ended, take fewer --workers"):
        list(parallel_text.each_line(_killed, ["a"] * 9, 2))


def test_workers_end_with_their_parent() -> None:
    """Which may be killed, and has perhaps a lock that they have inherited."""
    code = "from fairseq_plugins.tools.parallel_text import each_line\n"
    code += "for _ in each_line(lambda: str, (str(number) for number in range(10**9)), 2): print()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
        try:
            process.communicate(timeout=30)  # to the end, when nobody has its output open any more
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _killed() -> parallel_text.Line:
    return lambda _: str(os.kill(os.getpid(), signal.SIGKILL))


def _english() -> parallel_text.Line:
    return parallel_text.moses("en")


def test_sides_of_different_length_are_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1\n2\n")
    (tmp_path / "b").write_text("1\n")
    with pytest.raises(ValueError, match="b ends before line 2 of "):
        list(parallel_text.read_pairs(tmp_path / "a", tmp_path / "b"))


def test_what_cannot_be_downloaded_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"/orig/sumdata/train/train\.article\.txt is missing\. It is under a licence"):
        cli.main(["prepare", "gigaword", str(tmp_path)])


@pytest.mark.parametrize("name", sorted(CORPORA))
def test_every_download_is_described_rightly(name: str) -> None:
    """One sum for one address, in the right form; all paths are below the folder."""
    sums: dict[str, set[str | None]] = {}
    for file in CORPORA[name].files():
        assert not file.path.startswith(("/", ".."))
        if file.url is not None:
            sums.setdefault(file.url, set()).add(file.checksum)
            if file.checksum is not None:
                algorithm, _, digits = file.checksum.partition(":")
                assert len(digits) == 2 * hashlib.new(algorithm).digest_size
    assert all(len(found) == 1 for found in sums.values())
