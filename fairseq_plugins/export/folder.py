"""Function that writes the folder of an exported model."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from fairseq.data import Dictionary

from fairseq_plugins.export.model import write_programs
from fairseq_plugins.vocabulary.candidates import Candidates

_README = """A translation model ({family}). It needs Python 3.10 or later and these packages:

    pip install {packages}

Translate line by line, or from Python:

    python translate.py < source.txt > translation.txt
    >>> from translate import Translator; Translator(".").translate(["A sentence."], beam=5, nbest=1)

`python translate.py --help` lists all options. The files are verified against SHA256SUMS at each start.
"""


def write_folder(
    folder: Path,
    model: Any,
    source: Dictionary,
    target: Dictionary,
    *,
    codes: Path | None,
    pieces: Path | None = None,
    languages: tuple[str, str] | None,
    pair: tuple[str, str] | None = None,
    longest_source: int,
    int8: bool,
    candidates: Candidates | None,
    card: str = "",
) -> None:
    """Write all files of an exported model.

    Args:
        folder: empty folder.
        model: model of this plugin, after `make_generation_fast_`.
        source: source words.
        target: target words.
        codes: file with subword-nmt's codes; None if the model does not use subword-nmt.
        pieces: file of the sentencepiece model; None if the model does not use sentencepiece.
        languages: source and target language for Moses' tokeniser; None if input text is already tokenised.
        pair: source and target language of the model; None if unknown.
        longest_source: maximum number of source tokens that the task allows.
        int8: whether to compute products in int8.
        candidates: table of candidate words; None for all words.
        card: text of a model card, which is appended to README.md.
    """
    programs = write_programs(model, folder, int8=int8, with_candidates=candidates is not None)
    for side, dictionary in (("source", source), ("target", target)):
        (folder / f"{side}.txt").write_text("".join(f"{word}\n" for word in dictionary.symbols), encoding="utf-8")
    if codes is not None:
        shutil.copyfile(codes, folder / "codes.txt")
    if pieces is not None:
        shutil.copyfile(pieces, folder / "pieces.model")
    if candidates is not None:
        always = candidates.always.nonzero().flatten().numpy()
        np.savez(folder / "candidates.npz", translations=candidates.translations.numpy(), always=always)
    source_language, target_language = languages or (None, None)
    config = {
        "format": 3,
        **{name: getattr(target, name)() for name in ("bos", "pad", "eos", "unk")},
        "source_words": len(source),
        "target_words": len(target),
        "languages": pair,
        "source_language": source_language,
        "target_language": target_language,
        "bpe_separator": None if codes is None else "@@",
        "sentencepiece": pieces is not None,
        "candidates": candidates is not None,
        **programs,
        "source_positions": min(programs["source_positions"], longest_source),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    sums = (f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(folder.iterdir()))
    (folder / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")
    shutil.copyfile(Path(__file__).with_name("translate.py"), folder / "translate.py")
    needed = {"subword-nmt": codes, "sacremoses": languages, "sentencepiece": pieces}
    packages = ["numpy", "onnxruntime", *(name for name, used in needed.items() if used)]
    family = type(model).__name__.removesuffix("Model")
    readme = _README.format(family=family, packages=" ".join(packages)) + (f"\n{card}" if card else "")
    (folder / "README.md").write_text(readme, encoding="utf-8")
