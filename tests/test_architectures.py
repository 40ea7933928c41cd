"""Pictures of architectures show the sizes of the models, as given in the papers."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.commands import ROOT, script

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


@pytest.mark.parametrize(
    ("architecture", "complaint"),
    [
        ("transformer_tiny", "ARCH transformer_tiny: .* TransformerEncoder"),
        ("conv_encoder_pooling", "ARCH conv_encoder_pooling: .* PoolingEncoder"),
        ("nothing", "ARCH nothing: not an architecture"),
    ],
)
def test_others_are_refused(draw: Callable[[str], Any], architecture: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        draw(architecture)


def test_the_script_writes_a_picture(tmp_path: Path) -> None:
    result = script(FOLDER / "draw.py", "conv_encoder_tiny", tmp_path / "picture.png")
    assert result.returncode == 0, result.stderr[-3000:]
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
