"""Translate with CTranslate2 for newstest.py, with the batches and the output format of fairseq-generate.

ctranslate2_command.py MODEL TEXT PRECISION BEAM MAX_TOKENS THREADS
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.modules["torch"] = None  # type: ignore[assignment]  # CTranslate2 would import torch, and does not need it

import ctranslate2  # noqa: E402


def main() -> None:
    model, text, precision, *numbers = sys.argv[1:]
    beam, max_tokens, threads = map(int, numbers)
    translator = ctranslate2.Translator(model, compute_type=precision, intra_threads=threads)
    sentences = [line.split() for line in Path(text).read_text(encoding="utf-8").split("\n")[:-1]]
    batches: list[list[int]] = []
    for number in sorted(range(len(sentences)), key=lambda number: len(sentences[number])):
        if not batches or (len(batches[-1]) + 1) * (len(sentences[number]) + 1) > max_tokens:
            batches.append([])
        batches[-1].append(number)
    for batch in batches:
        length = len(sentences[batch[-1]]) + 1  # the maximum length that newstest.py sets for fairseq-generate
        results = translator.translate_batch(
            [sentences[number] for number in batch],
            beam_size=beam,
            return_scores=True,
            min_decoding_length=length,
            max_decoding_length=length,
        )
        for number, result in zip(batch, results, strict=True):
            print(f"H-{number}\t{result.scores[0]}\t{' '.join(result.hypotheses[0])}")


if __name__ == "__main__":
    main()
