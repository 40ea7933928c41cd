"""A file of another kind than a command expects causes a clear error, whatever it contains."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq_plugins.cli import main as cli
from fairseq_plugins.cli.files import naming_file_in_errors


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (KeyError("x"), "^a.txt .*KeyError"),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), "^a.txt .*UnicodeDecodeError"),
        (OSError("x"), "^x$"),
        (pickle.UnpicklingError("x"), "^x$"),
        (KeyboardInterrupt(), "^$"),
    ],
)
def test_errors_name_the_file(error: BaseException, message: str) -> None:
    """An error that already names the file, or an interrupt, is not changed."""
    kind = ValueError if "a.txt" in message else type(error)
    with pytest.raises(kind, match=message), naming_file_in_errors(Path("a.txt"), "cannot be read"):
        raise error


def with_options(part: str, **options: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda state: {**state, "cfg": {**state["cfg"], part: {**state["cfg"][part], **options}}}


def with_other_numbers(state: dict[str, Any]) -> dict[str, Any]:
    model = {
        name: torch.full_like(value, torch.nan) if value.is_floating_point() and "version" not in name else value
        for name, value in state["model"].items()
    }
    return {**state, "model": model}


@pytest.mark.parametrize(
    "change",
    [
        with_other_numbers,
        with_options("task", eval_bleu=True, eval_bleu_detok="odd"),
        with_options("task", eval_bleu=True, eval_bleu_args="[1]"),
        with_options("task", _name="odd"),
        lambda state: {**state, "cfg": {**state["cfg"], "model": {"_name": "odd"}}},
        lambda state: {**state, "cfg": {**state["cfg"], "model": []}},
        lambda state: {**state, "cfg": {}},
        lambda state: {**state, "optimizer_history": 3},
    ],
)
def test_pictures_of_odd_checkpoints(change, state, data, tmp_path) -> None:
    torch.save(change(state), tmp_path / "odd.pt")
    picture = ["--output", str(tmp_path / "picture.svg")]
    sentence = ["--path", str(tmp_path / "odd.pt"), "--input", "w1 w2"]
    with pytest.raises(SystemExit, match="plot-attention: error: "):
        cli.main(["plot-attention", str(data), *sentence, *picture])
    with pytest.raises(SystemExit, match=r"plot-branches: error: .*odd\.pt"):
        cli.main(["plot-branches", str(tmp_path / "odd.pt"), *picture])
