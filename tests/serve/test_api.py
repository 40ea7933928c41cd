"""The HTTP API with unchanged clients: translations equal those of `translate.py`, and errors are clear."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import numpy as np
import polib
import pytest
from libretranslatepy import LibreTranslateAPI

from fairseq_plugins.cli import main as cli
from fairseq_plugins.cli.serve import app
from fairseq_plugins.cli.serve.batches import Batches, Threads
from fairseq_plugins.export.translate import Translator
from tests.commands import ROOT
from tests.export.exporting import lines_of
from tests.serve.serving import Server, serving
from tests.serve.test_batches import Recorder

WORDS = 40
LINES = [*lines_of([3, 9, 1, 5, 12, 7], WORDS), "never seen", "\u200b"]


def multipart(**fields: str | tuple[str, bytes]) -> dict[str, Any]:
    """Return the body and headers of a form with a file."""
    parts = []
    for name, value in fields.items():
        file, content = ("", value.encode()) if isinstance(value, str) else value
        more = f'; filename="{file}"' if file else ""
        head = f'--limit\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'
        parts.append(head.encode() + content + b"\r\n")
    return {
        "body": b"".join(parts) + b"--limit--\r\n",
        "headers": {"content-type": "multipart/form-data; boundary=limit"},
    }


def test_a_client_of_libretranslate(server: Server, translator: Translator) -> None:
    client = LibreTranslateAPI(server.url)
    assert client.languages() == [
        {"code": "en", "name": "English", "targets": ["de"]},
        {"code": "de", "name": "German", "targets": []},
    ]
    assert client.translate(LINES[1], "en", "de") == translator.translate(LINES[1:2])[0]
    assert client.translate(LINES[1], "auto", "de") == translator.translate(LINES[1:2])[0]
    assert client.detect("w1") == [{"confidence": 0.0, "language": "en"}]
    with pytest.raises(HTTPError, match="400"):
        client.translate("w1", "en", "fr")


def test_texts_of_several_sentences(server: Server, translator: Translator) -> None:
    """Each line and each sentence is translated separately, and white space stays."""
    assert server.translate(LINES)["translatedText"] == translator.translate(LINES)
    one, two, three = (translator.translate([each])[0] for each in ("w1 w2.", "W3!", "w4 w5"))
    found = server.translate([" w1 w2.  W3!\r\n\n\tw4 w5 ", "", "\n"], source="auto")
    assert found["translatedText"] == [f" {one}  {two}\r\n\n\t{three} ", "", "\n"]
    assert found["detectedLanguage"] == [{"confidence": 0.0, "language": "en"}] * 3


def test_n_best_scores_and_attention(server: Server, translator: Translator) -> None:
    text, (told,) = "w1 w2 %s foo", translator.explain(["w1 w2 %s foo"], attention=True, nbest=4)
    found = server.translate(text, alternatives=3, attention=True)
    wanted = [each["text"] for each in told["translations"]]
    assert found["translatedText"] == wanted[0]
    assert found["alternatives"] == [each for each in dict.fromkeys(wanted) if each != wanted[0]]
    (sentence,) = found["sentences"]
    assert {name: sentence[name] for name in ("before", "text", "after", "words", "unknown", "cut")} == {
        "before": "", "text": text, "after": "", "words": text.split(), "unknown": [2, 3], "cut": 0,
    }  # fmt: skip
    for mine, theirs in zip(sentence["translations"], told["translations"], strict=True):
        assert {name: mine[name] for name in ("text", "words", "unknown", "lost")} == {
            **{name: theirs[name] for name in ("text", "words", "unknown")}, "lost": ["%s"],
        }  # fmt: skip
        assert mine["score"] == pytest.approx(theirs["score"], abs=1e-3)
        np.testing.assert_allclose(mine["attention"], theirs["attention"], atol=2e-3)
    assert server.translate("w1 " * 100, details=True)["sentences"][0]["cut"] == 37
    assert "attention" not in server.translate(text, details=True)["sentences"][0]["translations"][0]
    assert "sentences" not in server.translate(text)


GOOD = {"q": "w1", "source": "en", "target": "de"}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        *(({"q": value}, "q parameter") for value in ("", None, [], ["w1", 2], {"a": 1})),
        ({"source": ["en"]}, "source parameter"),
        ({"target": None}, "target parameter"),
        ({"source": "xx"}, "xx"),
        ({"target": "auto"}, "auto"),
        ({"source": "de", "target": "en"}, "(de)"),
        ({"source": "auto", "target": "en"}, "(en)"),
        ({"format": "html"}, "html"),
        *(({"alternatives": value}, "alternatives parameter") for value in ("many", 5, float("inf"))),
    ],
)
def test_wrong_parameters(server: Server, change: dict[str, Any], named: str) -> None:
    status, answer, _ = server.ask("/translate", {**GOOD, **change})
    assert (status, answer.keys()) == (400, {"error"})
    assert named in answer["error"]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b"nope", b"[" * 100_000, b'{"q": ' + b"9" * 5000 + b"}", b'"\\ud800"', b'"\xed\xa0\x80"'],
    ids=range(8),
)
@pytest.mark.parametrize("kind", ["application/json", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_bodies_that_cannot_be_read(server: Server, kind: str, body: bytes) -> None:
    status, answer, _ = server.ask("/translate", body, headers={"content-type": kind})
    assert (status, answer.keys()) == (400, {"error"})


def test_pages_that_do_not_exist(server: Server) -> None:
    for path in ("/translate", "/nope", "/download_file/nope", "/download_file/..%2f..%2fetc%2fpasswd"):
        status, answer, _ = server.ask(path)
        assert (status, answer.keys()) == (404, {"error"})


def test_settings(server: Server) -> None:
    """A request may have as many alternatives and characters as the settings say, and 2000 texts, but not more."""
    limits = server.ask("/frontend/settings")[1]
    for more, expected in ((0, 200), (1, 400)):
        assert server.ask("/translate", {**GOOD, "alternatives": limits["alternativesLimit"] + more})[0] == expected
    longest = " " * limits["charLimit"]
    for q, expected in ((longest, 200), (longest + " ", 413), ([""] * 2000, 200), (["", " "] * 1001, 413)):
        assert server.ask("/translate", {**GOOD, "q": q})[0] == expected


def test_limits(folder: Path, tmp_path: Path) -> None:
    """The server limits text length, number of sentences and time, and stops translating if the caller disconnects."""
    options = ["--max-letters", 300_000, "--max-waiting", 20_000, "--timeout", 1]
    with serving(tmp_path / "log", folder, *options) as server:
        for q, expected in (("w1 " * 100_001, 413), ("w1.\n" * 20_001, 413), ("w1 w2 w3.\n" * 20_000, 503)):
            status, answer, _ = server.ask("/translate", {**GOOD, "q": q})
            assert (status, answer.keys()) == (expected, {"error"})
        assert server.ask("/translate", b"q=" + b"w" * 4_000_000)[0] == 413
        assert server.is_idle(), "it translates although no caller waits"
    with serving(tmp_path / "log", folder, "--max-letters", 300_000, "--max-waiting", 20_000) as server:
        longest = urlencode({**GOOD, "q": "\U0001f600" * 300_000})  # twelve bytes for each letter
        assert server.ask("/translate", longest.encode())[0] == 200
        left = server.connect()
        left.request("POST", "/translate", urlencode({**GOOD, "q": "w1 w2 w3.\n" * 20_000}))
        assert any(not server.is_idle() for _ in range(20))  # the server first reads the request
        left.close()
        assert server.is_idle(), "it translates although no caller waits"
    with serving(tmp_path / "log", folder, "--max-waiting", 3, "--threads", 1) as server:
        busy = server.connect()
        busy.request("POST", "/translate", urlencode({**GOOD, "q": "\n".join(["w1 " * 60] * 3)}))
        statuses = {server.ask("/translate", GOOD)[0] for _ in range(3)}
        assert busy.getresponse().status == 200
        assert 429 in statuses
        assert server.ask("/translate", GOOD)[0] == 200


def test_only_utf8_in_forms(server: Server) -> None:
    """Other codecs of Python, such as punycode, may take minutes."""
    form = multipart(**GOOD)
    assert server.ask("/translate", **form)[1] == server.ask("/translate", GOOD)[1]
    for charset, expected in (("UTF-8", 200), ("utf8", 200), ("latin-1", 400), ("punycode", 400)):
        headers = {"content-type": f"{form['headers']['content-type']}; charset={charset}"}
        assert server.ask("/translate", form["body"], headers=headers)[0] == expected


def test_four_files_at_a_time(folder: Path, tmp_path: Path) -> None:
    content = "\n".join(f"w{number % 40} w{number // 40 % 40} w1" for number in range(1600)).encode()
    with serving(tmp_path / "log", folder) as server:
        for progress in ("", "1"):
            form = multipart(file=("a.txt", content), progress=progress, **GOOD)
            with ThreadPoolExecutor(12) as pool:
                statuses = [*pool.map(lambda _, form=form: server.ask("/translate_file", **form)[0], range(12))]
            assert Counter(statuses) == {200: 4, 429: 8}
        assert server.ask("/translate_file", **form)[0] == 200


def test_the_server_stops_if_a_queue_ends(capsys: pytest.CaptureFixture[str]) -> None:
    """Otherwise all requests to this model would reach the time limit."""

    class Broken(Batches):
        async def run(self) -> None:
            raise RuntimeError("can't start new thread")

    async def start(translator: Any) -> None:
        limits = app.Limits(key=None, letters=1, seconds=1, origins=[])
        served = app.make_app({("en", "de"): Broken(translator, Threads(1), 5, 1)}, limits)
        async with served.router.lifespan_context(served):
            await asyncio.sleep(0.1)

    signals: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    try:
        asyncio.run(start(Recorder()))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert signals == [signal.SIGTERM]
    assert "can't start new thread" in capsys.readouterr().err


def test_key(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sesam\n", encoding="utf-8-sig")
    with serving(tmp_path / "log", folder, "--api-key-file", tmp_path / "key") as server:
        assert server.ask("/frontend/settings")[1]["keyRequired"] is True
        for path in ("/translate", "/detect", "/translate_file"):
            assert server.ask(path, GOOD)[0] == 403
            assert server.ask(path, {**GOOD, "api_key": "sesame"})[0] == 403
        client = LibreTranslateAPI(server.url, api_key="sesam")
        assert client.translate("w1", "en", "de") == server.translate("w1", api_key="sesam")["translatedText"]
        assert b"sesam" not in Path(f"/proc/{server.process.pid}/cmdline").read_bytes()


def test_headers(server: Server, folder: Path, tmp_path: Path) -> None:
    """Only sites that --cors names may call the server, and the page's policy forbids content of other sites."""
    origin = {"origin": "https://a.example"}
    for path in ("/", "/languages", "/docs.html", "/nope"):
        headers = server.ask(path, headers=origin)[2]
        assert "access-control-allow-origin" not in headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
    with serving(tmp_path / "log", folder, "--cors", "https://a.example") as other:
        assert other.ask("/languages", headers=origin)[2]["access-control-allow-origin"] == "https://a.example"
        wish = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
        preflight = Request(f"{other.url}/translate", headers={**origin, **wish}, method="OPTIONS")
        with urlopen(preflight) as answer:
            assert answer.status == 200
        assert "access-control-allow-origin" not in other.ask("/languages", headers={"origin": "https://b.example"})[2]


def test_a_text_file(server: Server, translator: Translator) -> None:
    """The text has a byte order mark and line ends of all kinds; a path in the file name has no effect."""
    content = b"\xef\xbb\xbfw1 w2.\r\n\nw3 w4. W5\r\n"
    form = multipart(file=('..\\../x/\u00e4".txt', content), source="auto", target="de")
    answer = server.ask("/translate_file", **form)[1]
    assert answer["report"] == ""
    status, found, headers = server.ask(answer["translatedFileUrl"].removeprefix(server.url))
    one, two, three = translator.translate(["w1 w2.", "w3 w4.", "W5"])
    assert (status, found.decode()) == (200, f"{one}\r\n\n{two} {three}\r\n")
    assert headers["content-disposition"].startswith("attachment; ")
    assert "/" not in headers["content-disposition"].partition("''")[2]


def test_a_catalogue(server: Server, translator: Translator) -> None:
    """Empty entries are filled as by own-data, and the answer reports progress."""
    catalogue = polib.POFile()
    catalogue.metadata = {"Content-Type": "text/plain; charset=UTF-8"}
    for number in range(200):
        catalogue.append(polib.POEntry(msgid=f"w{number % 40} w{number // 40} %s\n"))
    catalogue.append(polib.POEntry(msgid="w1", msgstr="done"))
    form = multipart(file=("a.po", str(catalogue).encode()), source="en", target="de", progress="1")
    *steps, last = map(json.loads, server.ask("/translate_file", **form)[1].splitlines())
    assert steps == [{"done": done, "total": 200} for done in (0, 128)]
    assert re.findall(r"\d+", last["report"])[:2] == ["200", "200"]  # entries, and entries without placeholders
    filled = polib.pofile(server.ask(last["translatedFileUrl"].removeprefix(server.url))[1].decode())
    assert [entry.msgstr for entry in filled][-2:] == [translator.translate(["w39 w4 %s"])[0] + "\n", "done"]
    assert all(entry.fuzzy for entry in filled[:-1])


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.po", b'msgid "a"\nnonsense\n'), ("a.po", b"/etc/passwd"), ("a.txt", b"\xff\xfew\0"), ("a.png", b"\x89PNG\0")],
)
def test_files_that_cannot_be_read(server: Server, name: str, content: bytes) -> None:
    status, answer, _ = server.ask("/translate_file", **multipart(file=(name, content), source="en", target="de"))
    assert (status, answer.keys()) == (400, {"error"})
    assert name in answer["error"]
    assert "/tmp" not in answer["error"]


def test_several_folders(folder: Path, back: Path, tmp_path: Path) -> None:
    with serving(tmp_path / "log", folder, f"de:en={back}") as server:
        found = server.translate(["w1 w2"], source="de", target="en")["translatedText"]
        assert found == Translator(back, 1).translate(["w1 w2"])
        assert [each["targets"] for each in server.ask("/languages")[1]] == [["de"], ["en"]]
        assert server.ask("/detect", {"q": "w1"})[0] == 400
        assert server.translate("w1", source="auto", target="en")["detectedLanguage"]["language"] == "de"


def test_folders_that_cannot_be_served(folder: Path, back: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "settings").write_text("{}")
    for words, named in (
        ([tmp_path], tmp_path),
        ([own], own),
        ([back], f"en:de={back}"),
        ([folder, f"en:de={back}"], "en to de"),
        ([folder, "--host", "192.0.2.1"], "--host 192.0.2.1 --port 8000"),
        ([folder, "--api-key-file", tmp_path / "nokey"], "--api-key-file .*nokey"),
        ([folder, "--api-key-file", "/dev/null"], "--api-key-file /dev/null"),
        ([folder, "--cors", "example.org"], "--cors example.org"),
    ):
        with pytest.raises(SystemExit, match=f"serve: error: .*{named}"):
            cli.main(["serve", *map(str, words)])
    shutil.copytree(back, own / "arch.exported")
    with serving(tmp_path / "log", f"cs:de={own}") as server:
        assert server.ask("/languages")[1][0]["code"] == "cs"


def test_openapi(server: Server) -> None:
    """The document names all endpoints and no others, and the fields that they read."""
    document = server.ask("/openapi.json")[1]
    for path, (method,) in document["paths"].items():
        status = server.ask(path, b"" if method == "post" else None, method=method.upper())[0]
        assert status == (400 if method == "post" else 404 if "{" in path else 200)
    source = ROOT / "fairseq_plugins" / "cli" / "serve" / "app.py"
    routes = re.findall(r'Route\("(/[a-z_/]+[^"]*)", api\.', source.read_text())
    assert {path.replace("{name}", "{key}") for path in document["paths"]} == set(routes)
