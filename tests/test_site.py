"""``make site`` builds all pages with search, and each link has a target."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.commands import ROOT
from tests.test_documentation import PAGES

pytestmark = pytest.mark.skipif(
    not all(map(find_spec, ("sphinx", "myst_parser", "furo"))), reason="what builds the site is not installed"
)


def build(source: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build the site with the Makefile's options."""
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
    logs = {*ROOT.glob("examples/*/findings.md"), *ROOT.glob("examples/benchmarks/*.md")}
    pages = [page.relative_to(ROOT).with_suffix(".html") for page in PAGES if page not in logs]
    assert [page for page in pages if not (site / page).is_file()] == []
    assert "README.html" in (site / "index.html").read_text("utf-8")
    index = (site / "searchindex.js").read_text("utf-8")
    assert [page for page in pages if f'"{page.with_suffix("")}"' not in index] == []


def test_broken_links_and_lost_pages_are_errors(tmp_path: Path) -> None:
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
