"""Export of models for tests, and comparison with `translation_fast`."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import torch
from fairseq.data import Dictionary, data_utils
from torch import Tensor

from fairseq_plugins.export.model import write_folder
from fairseq_plugins.search.generator import FastBeamSearch

TIE = 1e-4  # in nats: hypotheses with closer scores may change places by rounding


def export(model: Any, folder: Path, dictionary: Dictionary, **options: Any) -> Path:
    """Export a model with the same dictionary for source and target."""
    folder.mkdir()
    model.make_generation_fast_(need_attn=True)
    write_folder(folder, model, dictionary, dictionary, **{"longest_source": 64, **options})
    return folder


def lines_of(lengths: list[int], words: int, seed: int = 3) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    return [" ".join(f"w{int(word)}" for word in torch.randint(words, (n,), generator=generator)) for n in lengths]


def collated(lines: list[str], dictionary: Dictionary) -> Tensor:
    """Return a batch as fairseq collates it, padded on the left."""
    tokens = [dictionary.encode_line(line, add_if_not_exist=False).long() for line in lines]
    batch: Tensor = data_utils.collate_tokens(tokens, dictionary.pad(), left_pad=True)
    return batch


def search(model: Any, dictionary: Dictionary, lines: list[str], **options: Any) -> list[list[dict[str, Any]]]:
    generator = FastBeamSearch([model], dictionary, **options)
    source = collated(lines, dictionary)
    lengths = source.ne(dictionary.pad()).sum(dim=1)
    found: list[list[dict[str, Any]]] = generator.generate(
        [model], {"net_input": {"src_tokens": source, "src_lengths": lengths}}
    )
    return found


def assert_same(actual: list[Any], expected: list[list[dict[str, Any]]], dictionary: Dictionary) -> None:
    """Compare lists of translations, except for the order of scores that differ only by rounding."""
    for mine, theirs in zip(actual, expected, strict=True):
        scores = [float(each["score"]) for each in theirs]
        assert len(mine) == len(theirs)
        for place, (text, score) in enumerate(mine):
            assert abs(score - scores[place]) < TIE
            ties = [each for each, other in zip(theirs, scores, strict=True) if abs(other - score) < TIE]
            assert text in [dictionary.string(each["tokens"]) for each in ties]


def parts(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if path.name not in ("translate.py", "README.md", "__pycache__")]


def update_checksums(folder: Path) -> None:
    """Write SHA256SUMS for the current files."""
    paths = [path for path in parts(folder) if path.is_file() and path.name != "SHA256SUMS"]
    sums = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in paths)
    shutil.rmtree(folder / "SHA256SUMS", ignore_errors=True)
    (folder / "SHA256SUMS").write_text(sums)
