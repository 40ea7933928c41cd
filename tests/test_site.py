"""``make site``: all pages, with search, and each link leads to something."""

from __future__ import annotations

import re
import subprocess
import sys
from html import unescape
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.commands import ROOT
from tests.test_documentation import PAGES

pytestmark = pytest.mark.skipif(
    not all(map(find_spec, ("sphinx", "myst_parser", "furo"))), reason="what builds the site is not installed"
)


def build(source: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """As the Makefile does."""
    (command,) = re.findall(r"sphinx-build (.*) -c docs \. build/site$", (ROOT / "Makefile").read_text("utf-8"), re.M)
    command = [sys.executable, "-m", "sphinx", *command.split(), "-c", ROOT / "docs", source, site]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    result = build(ROOT, folder)
    assert not result.returncode, result.stderr
    return folder


def test_all_pages_are_there(site: Path) -> None:
    pages = [page.relative_to(ROOT).with_suffix(".html") for page in PAGES]
    assert [page for page in pages if not (site / page).is_file()] == []
    assert "README.html" in (site / "index.html").read_text("utf-8")
    index = (site / "searchindex.js").read_text("utf-8")
    assert [page for page in pages if f'"{page.with_suffix("")}"' not in index] == []


def test_links_lead_to_files_and_headings(site: Path) -> None:
    anchors = {
        page.resolve(): set(re.findall(r' id="([^"]+)"', page.read_text("utf-8"))) for page in site.rglob("*.html")
    }
    broken = []
    for page in anchors:
        for target in re.findall(r' (?:href|src)="([^"]*)"', page.read_text("utf-8")):
            file, _, anchor = unquote(unescape(target)).partition("#")
            path = (page.parent / file.partition("?")[0]).resolve() if file else page
            wrong = not path.exists() or (anchor and path in anchors and anchor not in anchors[path])
            if not re.match(r"[a-z]+:", target) and wrong:
                broken.append(f"{page.relative_to(site.resolve())}: {target}")
    assert broken == []


def test_what_is_broken_or_lost_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# Front\n\n[a](nowhere.md)\n[a](#nothing)\n[a](lost/)\n![a](none.png)\n")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "new.md").write_text("# New\n")
    result = build(tmp_path, tmp_path / "site")
    assert result.returncode
    for complaint in (
        "'nowhere.md'",
        "'nothing'",
        "'lost/'",
        "none.png",
        "docs/new.md: WARNING: document isn't included",
    ):
        assert complaint in result.stderr
