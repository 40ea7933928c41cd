"""The page in a real browser."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fairseq_plugins.export.translate import Translator
from tests.serve.serving import Server, serving

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")

CATALOGUE = 'msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8\\n"\n\nmsgid "w1 %s"\nmsgstr ""\n'
DROP = """([name, text]) => {
    const data = new DataTransfer();
    data.items.add(new File([text], name));
    document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start Chromium, playwright's or the system's."""
    with playwright.sync_playwright() as driver:
        system = shutil.which("chromium") or shutil.which("google-chrome")
        path = None if Path(driver.chromium.executable_path).exists() else system
        if path is None and not Path(driver.chromium.executable_path).exists():
            pytest.skip("needs Chromium: playwright install chromium")
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Any]:
    """Open the page, which must log no error and contact no other server."""
    context = browser.new_context()
    yield from opened(context, server)
    context.close()


def opened(context: Any, server: Server) -> Iterator[Any]:
    page, errors, asked = context.new_page(), [], []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda told: errors.append(told.text) if "Content Security" in told.text else None)
    page.on("request", lambda request: asked.append(request.url))
    page.goto(server.url)
    yield page
    assert errors == []
    assert all(url.startswith(server.url) for url in asked)


def translate(page: Any, text: str) -> None:
    with page.expect_response("**/translate"):
        page.fill("#source", text)
    shows(page, ".stale", count=0)


def shows(page: Any, selector: str, text: Any = None, count: int | None = None) -> None:
    """Wait for an element's text, or for a number of elements."""
    expected = playwright.expect(page.locator(selector))
    if text is not None:
        expected.to_have_text(text)
    else:
        expected.to_have_count(count)


def test_typing(page: Any, translator: Translator) -> None:
    """The translation is that of the newest text, and text is never interpreted as markup."""
    requests = []
    page.on("request", lambda request: requests.append(request.url))
    page.locator("#source").press_sequentially("w1 w2 w3", delay=20)
    shows(page, "#target", translator.translate(["w1 w2 w3"])[0])
    assert len(requests) < 8
    translate(page, "<b>w1</b> <img src=x onerror=alert(1)>\nw2 %s")
    expected = translator.translate(["<b>w1</b> <img src=x onerror=alert(1)>", "w2 %s"])
    assert page.inner_text("#target").split("\n") == expected
    assert page.locator("#target img, #heat b, #nbest b").count() == 0
    page.fill("#source", "")
    shows(page, ".sentence", count=0)


def test_stale_answers_are_dropped(page: Any, translator: Translator) -> None:
    """An answer that arrives after newer text was typed is ignored."""
    late = []
    page.route("**/translate", lambda route: route.continue_() if late else late.append(route))
    page.fill("#source", "w1 w2 w3 w4")
    page.wait_for_timeout(350)
    translate(page, "w9")
    late[0].continue_()
    page.wait_for_timeout(300)
    shows(page, "#target", translator.translate(["w9"])[0])


def test_n_best_and_attention_by_keyboard(page: Any, translator: Translator) -> None:
    (told,) = translator.explain(["foo w2 %s"], attention=True, nbest=5)
    translate(page, "w7 w8\nfoo w2 %s")
    page.locator(".sentence").nth(1).focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.getAttribute('aria-pressed')") == "true"
    assert page.locator("#nbest span").all_inner_texts() == [each["text"] for each in told["translations"]]
    scores = [float(text) for text in page.locator("#nbest output").all_inner_texts()]
    assert scores == pytest.approx([each["score"] for each in told["translations"]], abs=0.006)
    unknown, lost = page.inner_text("#notes").split("\n")
    assert "foo, %s" in unknown
    assert "%s" in lost
    page.locator("#map summary").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("#heat td")
    page.locator("#nbest input").first.focus()
    page.keyboard.press("ArrowDown")
    second = told["translations"][1]
    assert page.locator(".sentence").nth(1).inner_text() == second["text"]
    assert page.locator("#heat thead th").all_inner_texts() == ["foo", "w2", "%s", "(end)"]
    assert page.locator("#heat thead th.unknown").count() == 2
    assert page.locator("#heat tbody th").all_inner_texts() == second["words"]
    layers = len(second["attention"])
    assert page.locator("#layer option").count() == layers + 1
    for layer in range(-1, layers):
        page.select_option("#layer", index=layer + 1)
        expected = second["attention"].mean(axis=0) if layer < 0 else second["attention"][layer]
        shown = [float(text) for text in page.locator("#heat tbody td").all_inner_texts()]
        assert shown == pytest.approx((100 * expected).ravel().tolist(), abs=0.6)


@pytest.mark.parametrize(("name", "text"), [("a.txt", "w1 w2\n\nw3\n"), ("a.po", CATALOGUE)])
def test_a_file_is_dropped(page: Any, translator: Translator, name: str, text: str, tmp_path: Path) -> None:
    page.wait_for_selector("#pair option", state="attached")
    page.evaluate(DROP, ["replaced.txt", "w1\n" * 50])
    page.evaluate(DROP, [name, text])
    page.wait_for_selector("#download:not([hidden])")
    with page.expect_download() as download:
        page.click("#download")
    download.value.save_as(tmp_path / "file")
    found = (tmp_path / "file").read_text()
    if name == "a.txt":
        one, two = translator.translate(["w1 w2", "w3"])
        assert found == f"{one}\n\n{two}\n"
    else:
        assert f'#, fuzzy\nmsgid "w1 %s"\nmsgstr "{translator.translate(["w1 %s"])[0]}"' in found
        assert "fuzzy: 1" in page.inner_text("#report")


def test_errors_are_shown(page: Any) -> None:
    translate(page, "w1")
    page.fill("#source", "w1 " * 40_000)
    page.wait_for_selector("#error:not([hidden])")
    assert "120000" in page.inner_text("#error")
    page.evaluate(DROP, ["a.png", "\0"])
    shows(page, "#error", re.compile(r"a\.png"))
    translate(page, "w1")
    assert not page.is_visible("#error")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 1200])
def test_layout_colours_and_names(browser: Any, server: Server, width: int, scheme: str) -> None:
    """No content is cut off, text is legible, each control has a name, and changes are announced."""
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    for page in opened(context, server):
        translate(page, " ".join(f"w{number}" for number in range(40)) + " " + "w" * 200)
        page.click("#map summary")
        page.wait_for_selector("#heat td")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        boxes = [page.locator(name).bounding_box() for name in ("#source", "#target")]
        assert (boxes[0]["y"] == boxes[1]["y"]) == (width > 720)
        colours = page.evaluate(
            "(({ color, backgroundColor }) => [color, backgroundColor])(getComputedStyle(document.body))"
        )
        ink, paper = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours)
        assert (ink < paper) == (scheme == "light")
        assert abs(ink - paper) > 500
        for role, name in (("textbox", "Text"), ("combobox", "Languages"), ("group", "Translation"),
                           ("combobox", "Layer"), ("region", "Attention"), ("button", "Copy")):  # fmt: skip
            assert page.get_by_role(role, name=name, exact=True).count() == 1, name
        assert page.get_by_role("radio").count() == page.locator("#nbest label").count()
        assert page.get_attribute("#target", "aria-live") == "polite"
        assert page.get_attribute("#error", "role") == "alert"
    context.close()


def test_the_key_is_asked_for(browser: Any, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sesam")
    with serving(tmp_path / "log", folder, "--api-key-file", tmp_path / "key") as server:
        context = browser.new_context()
        for page in opened(context, server):
            page.fill("#source", "w1 w2")
            page.wait_for_selector("#error:not([hidden])")
            page.fill("#key", "sesam")
            page.locator("#key").blur()
            page.wait_for_selector(".sentence")
        context.close()
