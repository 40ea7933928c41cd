"""Exported folders, and a server of one of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fairseq.data import Dictionary

from fairseq_plugins.export.translate import Translator
from tests.export.exporting import export
from tests.searches import model
from tests.serve.serving import Server, serving

pytest.importorskip("httptools")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, dictionary: Dictionary) -> Path:
    """Export an English-German model with the words w0 to w39."""
    path = tmp_path_factory.mktemp("exported") / "out"
    return export(model("convs2s_tiny", 1, False).float(), path, dictionary, languages=("en", "de"))


@pytest.fixture(scope="session")
def back(tmp_path_factory: pytest.TempPathFactory, dictionary: Dictionary) -> Path:
    """Export a model whose configuration names no languages."""
    path = tmp_path_factory.mktemp("exported") / "back"
    export(model("conv_encoder_tiny", 1, False).float(), path, dictionary)
    assert json.loads((path / "config.json").read_text())["languages"] is None
    return path


@pytest.fixture(scope="session")
def translator(folder: Path) -> Translator:
    return Translator(folder, 1)


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server") / "log", folder) as server:
        yield server
