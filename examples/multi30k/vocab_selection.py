#!/usr/bin/env python3
"""Translate the test part of Multi30k with several numbers of candidates, and with the whole vocabulary.

The arguments of ``vocab_selection.py PREPARED OUT LEXICON`` are prepare.py's output, a training folder and a lexicon
folder.  A missing lexicon is extracted from the training part.  For each number K of translations per source word, with
and without frequent words, the script prints the mean number of candidates of a batch of 16 sentences, the percentage
of reference tokens among the candidates, and BLEU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from pathlib import Path

import torch
from fairseq.data import Dictionary
from fairseq.data.data_utils import infer_language_pair

import fairseq_plugins
from fairseq_plugins.cli.parallel_text import read_text
from fairseq_plugins.vocabulary.candidates import Candidates

fairseq_plugins.install()

HERE = Path(__file__).resolve().parent
BATCH = 16  # sentences


def encode(path: Path, dictionary: Dictionary) -> list[torch.Tensor]:
    """Return the sentences of a text as tokens, each with an end-of-sentence token."""
    return [dictionary.encode_line(line, add_if_not_exist=False).long() for line in read_text(path, "")]


def measure(candidates: Candidates, source: list[torch.Tensor], target: list[torch.Tensor]) -> tuple[float, float]:
    """Return the mean number of candidates of a batch, and the percentage of reference tokens among the candidates."""
    order = sorted(range(len(source)), key=lambda i: len(source[i]))
    sizes, covered, total = [], 0, 0
    for start in range(0, len(order), BATCH):
        batch = order[start : start + BATCH]
        mask = candidates.mask(torch.cat([source[i] for i in batch]))
        words = torch.cat([target[i] for i in batch])
        sizes.append(int(mask.sum()))
        covered += int(mask[words].sum())
        total += len(words)
    return statistics.mean(sizes), 100 * covered / total


def bleu(prepared: Path, out: Path, *options: object) -> float:
    """Translate with additional options and return BLEU."""
    command = [HERE / "score.sh", prepared, out, "--batch-size", BATCH, *options]
    subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)
    scores = json.loads((out / "scores.json").read_text())
    return next(score["score"] for score in scores if score["name"] == "BLEU")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prepared", type=Path, help="output folder of prepare.py")
    parser.add_argument("out", type=Path, help="folder of a training")
    parser.add_argument("lexicon", type=Path, help="folder of the lexicon")
    parser.add_argument("--per-word", type=int, nargs="+", default=[1, 5, 10, 20, 50], help="numbers K to try")
    parser.add_argument("--frequent", type=int, nargs="+", default=[0, 1000], help="numbers of frequent words to try")
    args = parser.parse_args()

    source_lang, target_lang = infer_language_pair(args.prepared / "data-bin")
    if not args.lexicon.exists():
        sides = ["--source", args.prepared / f"train.{source_lang}", "--target", args.prepared / f"train.{target_lang}"]
        subprocess.run(["fairseq-plugins", "lexicon", *map(str, sides), "--output", str(args.lexicon)], check=True)
    dictionary = Dictionary.load(str(args.prepared / "data-bin" / f"dict.{target_lang}.txt"))  # of both languages
    source, target = (encode(args.prepared / f"test.{language}", dictionary) for language in (source_lang, target_lang))

    print(f"{'K':>4}{'frequent':>10}{'candidates':>12}{'coverage':>10}{'BLEU':>7}")
    print(f"{'':4}{'':10}{len(dictionary):12}{100:10.2f}{bleu(args.prepared, args.out):7.1f}", flush=True)
    for frequent in args.frequent:
        for per_word in args.per_word:
            candidates = Candidates.read(args.lexicon, dictionary, dictionary, per_word, frequent)
            size, coverage = measure(candidates, source, target)
            options = ["--task", "translation_fast", "--candidates", args.lexicon]
            options += ["--candidates-per-word", per_word, "--frequent-candidates", frequent]
            score = bleu(args.prepared, args.out, *options)
            print(f"{per_word:4}{frequent:10}{size:12.0f}{coverage:10.2f}{score:7.1f}", flush=True)


if __name__ == "__main__":
    main()
