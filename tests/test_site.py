"""``make site`` builds all pages with search, and each link has a target."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from fairseq_plugins.convs2s.layers import GatedConvolution
from tests.commands import ROOT
from tests.test_documentation import PAGES

pytestmark = pytest.mark.skipif(
    not all(map(find_spec, ("sphinx", "myst_parser", "furo"))), reason="what builds the site is not installed"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site with the Makefile's options, which make broken links and lost pages errors."""
    folder = tmp_path_factory.mktemp("site")
    (command,) = re.findall(r"sphinx-build (.*) -c docs \. build/site$", (ROOT / "Makefile").read_text("utf-8"), re.M)
    command = [sys.executable, "-m", "sphinx", *command.split(), "-c", ROOT / "docs", ROOT, folder]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not result.returncode, result.stderr
    return folder


def test_all_pages_are_there(site: Path) -> None:
    logs = {*ROOT.glob("examples/*/findings.md"), *ROOT.glob("examples/benchmarks/*.md")}
    pages = [page.relative_to(ROOT).with_suffix(".html") for page in PAGES if page not in logs]
    assert [page for page in pages if not (site / page).is_file()] == []
    assert "README.html" in (site / "index.html").read_text("utf-8")
    index = (site / "searchindex.js").read_text("utf-8")
    assert [page for page in pages if f'"{page.with_suffix("")}"' not in index] == []


def test_the_reference_has_the_docstrings(site: Path) -> None:
    text = (site / "docs" / "api.html").read_text("utf-8")
    assert 'id="fairseq_plugins.convs2s.layers.GatedConvolution"' in text
    assert GatedConvolution.__doc__.splitlines()[2].strip() in text
