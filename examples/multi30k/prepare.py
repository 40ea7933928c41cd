#!/usr/bin/env python3
"""Tokenise Multi30k, learn a joint BPE and binarise it for fairseq.

``prepare.py DATA OUT`` reads ``{train,val,test_2016_flickr}.{en,de}`` from DATA (plain or gzipped) and leaves in OUT
the tokenised text (``tok/``), the BPE codes (``codes``), the segmented text (``bpe/``), fairseq's binary data
(``data-bin/``) and the untouched reference of the test part (``test.reference``).  A step whose result is already there
is not repeated.
"""

from __future__ import annotations

import argparse
import gzip
import shutil
import subprocess
import sys
from pathlib import Path

from sacremoses import MosesTokenizer
from subword_nmt.apply_bpe import BPE
from subword_nmt.learn_bpe import learn_bpe
from tqdm import tqdm

SPLITS = {"train": "train", "valid": "val", "test": "test_2016_flickr"}
LANGUAGES = ("en", "de")


def read_lines(folder: Path, name: str) -> list[str]:
    """The lines of ``folder/name`` or ``folder/name.gz``, decoded as UTF-8."""
    plain, packed = folder / name, folder / f"{name}.gz"
    if packed.exists():
        text = gzip.decompress(packed.read_bytes())
    elif plain.exists():
        text = plain.read_bytes()
    else:
        sys.exit(f"{plain}(.gz) is missing; see the README beside this script for where to get Multi30k")
    return text.decode("utf-8").rstrip("\n").split("\n")


def tokenise(data: Path, out: Path) -> None:
    """Moses tokenisation of every split; source and target must have the same number of lines."""
    out.mkdir(parents=True, exist_ok=True)
    for split, name in SPLITS.items():
        lines = {language: read_lines(data, f"{name}.{language}") for language in LANGUAGES}
        counts = {language: len(text) for language, text in lines.items()}
        if len(set(counts.values())) != 1:
            sys.exit(f"{name}: the two languages have different numbers of lines: {counts}")
        for language, text in lines.items():
            moses = MosesTokenizer(language)
            # What fairseq's own `--tokenizer moses` does, so that fairseq-interactive takes raw text.
            tokens = (moses.tokenize(line, aggressive_dash_splits=True, return_str=True) for line in text)
            with (out / f"{split}.{language}").open("w", encoding="utf-8") as file:
                for line in tqdm(tokens, total=len(text), desc=f"tokenise {name}.{language}", leave=False):
                    file.write(line + "\n")


def segment(tok: Path, codes: Path, out: Path, merges: int) -> None:
    """Learn a joint BPE on the training part and apply it everywhere."""
    words = [line for language in LANGUAGES for line in read_lines(tok, f"train.{language}")]
    with codes.open("w", encoding="utf-8") as file:
        learn_bpe(words, file, merges)
    with codes.open(encoding="utf-8") as file:
        bpe = BPE(file)
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(tok.iterdir()):
        lines = read_lines(tok, path.name)
        with (out / path.name).open("w", encoding="utf-8") as file:
            for line in tqdm(lines, desc=f"segment {path.name}", leave=False):
                file.write(bpe.process_line(line) + "\n")


def binarise(bpe: Path, out: Path, source: str, target: str) -> None:
    """``fairseq-preprocess`` with one dictionary for both languages, so that embeddings can be tied."""
    command = [sys.executable, "-m", "fairseq_cli.preprocess", "--source-lang", source, "--target-lang", target]
    command += ["--joined-dictionary", "--workers", "2", "--destdir", str(out)]
    for option, split in (("--trainpref", "train"), ("--validpref", "valid"), ("--testpref", "test")):
        command += [option, str(bpe / split)]
    subprocess.run(command, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with the original text")
    parser.add_argument("out", type=Path, help="folder for everything that is made")
    parser.add_argument("--merges", type=int, default=6000, help="joint BPE merges (default: %(default)s)")
    parser.add_argument("--source-lang", default="en", choices=LANGUAGES, help="source language (default: %(default)s)")
    args = parser.parse_args()
    target = next(language for language in LANGUAGES if language != args.source_lang)

    settings = f"{args.source_lang}-{target}, {args.merges} merges\n"
    record = args.out / "settings"
    args.out.mkdir(parents=True, exist_ok=True)
    if record.exists() and record.read_text() != settings:
        sys.exit(f"{args.out} holds {record.read_text().strip()}; choose another folder for {settings.strip()}")
    record.write_text(settings)

    # Each step writes to a temporary name first, so that an interrupted step is repeated and a finished one is not.
    tok, codes, bpe, binary = (args.out / name for name in ("tok", "codes", "bpe", "data-bin"))
    if not tok.exists():
        tokenise(args.data, args.out / "tok.partial")
        (args.out / "tok.partial").rename(tok)
    if not bpe.exists():
        segment(tok, codes, args.out / "bpe.partial", args.merges)
        (args.out / "bpe.partial").rename(bpe)
    reference = read_lines(args.data, f"{SPLITS['test']}.{target}")
    (args.out / "test.reference").write_text("\n".join(reference) + "\n", encoding="utf-8")
    if not binary.exists():
        shutil.rmtree(args.out / "data-bin.partial", ignore_errors=True)  # fairseq refuses to write into an old one
        binarise(bpe, args.out / "data-bin.partial", args.source_lang, target)
        (args.out / "data-bin.partial").rename(binary)
    print(f"{binary}: {args.source_lang} -> {target}")


if __name__ == "__main__":
    main()
