"""The folder that a model leaves in."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fairseq.data import Dictionary

from fairseq_plugins import exported
from fairseq_plugins.export.model import write_programs
from fairseq_plugins.generation.candidates import Candidates

__all__ = ["TextOptions", "write_folder"]

_README = """A translation model ({family}), which needs Python 3.10 or later and these packages:

    pip install {packages}

It translates a line for each line, or from Python:

    python translate.py < source.txt > translation.txt
    >>> from translate import Translator; Translator(".").translate(["A sentence."], beam=5, nbest=1)

`python translate.py --help` tells all options. SHA256SUMS lists the files, which are checked whenever they are read.
"""


@dataclass(frozen=True)
class TextOptions:
    """What becomes of a line before the model and of the model's words after it.

    Attributes:
        codes: of byte pair encoding; None where text is in the model's words.
        separator: marks what is joined to the next subword.
        languages: source and target, for Moses' tokeniser; None where text is tokenised.
    """

    codes: Path | None = None
    separator: str = "@@"
    languages: tuple[str, str] | None = None


def write_folder(
    folder: Path,
    model: Any,
    source: Dictionary,
    target: Dictionary,
    *,
    text: TextOptions,
    longest_source: int,
    int8: bool,
    candidates: Candidates | None,
) -> None:
    """Write everything.

    Args:
        folder: empty.
        model: of this plugin, prepared to translate.
        source: source words.
        target: target words.
        text: how lines become words.
        longest_source: how many tokens of a source the task takes.
        int8: whether products are in int8.
        candidates: the words that a batch may need; None for all.
    """
    programs = write_programs(model, folder, int8=int8, among_candidates=candidates is not None)
    for side, dictionary in (("source", source), ("target", target)):
        _write(folder / f"{side}.txt", "".join(f"{word}\n" for word in dictionary.symbols))
    if text.codes is not None:
        shutil.copyfile(text.codes, folder / "codes.txt")
    if candidates is not None:
        always = candidates.always.nonzero().flatten().numpy()
        np.savez(folder / "candidates.npz", translations=candidates.translations.numpy(), always=always)
    languages = text.languages or (None, None)
    config = {
        "format": 1,
        **{name: getattr(target, name)() for name in ("bos", "pad", "eos", "unk")},
        "source_words": len(source),
        "target_words": len(target),
        "source_language": languages[0],
        "target_language": languages[1],
        "bpe_separator": None if text.codes is None else text.separator,
        "candidates": candidates is not None,
        **programs,
        "source_positions": min(programs["source_positions"], longest_source),
    }
    _write(folder / "config.json", json.dumps(config, indent=1, ensure_ascii=False) + "\n")
    sums = (f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(folder.iterdir()))
    _write(folder / "SHA256SUMS", "".join(sums))
    shutil.copyfile(Path(exported.__file__).with_name("translate.py"), folder / "translate.py")
    packages = [
        "numpy",
        "onnxruntime",
        *(["subword-nmt"] if text.codes else []),
        *(["sacremoses"] if text.languages else []),
    ]
    family = type(model).__name__.removesuffix("Model")
    _write(folder / "README.md", _README.format(family=family, packages=" ".join(packages)))


def _write(path: Path, text: str) -> None:
    path.write_bytes(text.encode("utf-8"))
