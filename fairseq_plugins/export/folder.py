"""The folder that a model leaves in."""

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

_README = """A translation model ({family}), which needs Python 3.10 or later and these packages:

    pip install {packages}

It translates a line for each line, or from Python:

    python translate.py < source.txt > translation.txt
    >>> from translate import Translator; Translator(".").translate(["A sentence."], beam=5, nbest=1)

`python translate.py --help` tells all options. SHA256SUMS lists the files, which are checked whenever they are read.
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
    """Write everything.

    Args:
        folder: empty.
        model: of this plugin, prepared to translate.
        source: source words.
        target: target words.
        codes: codes of subword-nmt, if the model has its subwords.
        pieces: model of sentencepiece, if the model has its pieces.
        languages: source and target, for Moses' tokeniser; None where text is tokenised.
        pair: source and target, for those who offer translations; None if they are not known.
        longest_source: how many tokens of a source the task takes.
        int8: whether products are in int8.
        candidates: the words that a batch may need; None for all.
        card: more for its README.md.
    """
    programs = write_programs(model, folder, int8=int8, among_candidates=candidates is not None)
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
