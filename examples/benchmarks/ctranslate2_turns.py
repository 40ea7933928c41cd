"""Translate with CTranslate2, in a process that generation.py starts.

CTranslate2 has its own process because CTranslate2's OpenMP would slow torch down in generation.py's process.
``ctranslate2_turns.py MODEL TEXT BEAM STEPS THREADS`` reads precisions from the standard input, one per line.  For each
precision, the script translates the text as one batch, and then prints the precision.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.modules["torch"] = None  # type: ignore[assignment]  # otherwise CTranslate2 would import torch without need

import ctranslate2  # noqa: E402


def main() -> None:
    model, text, *numbers = sys.argv[1:]
    beam, steps, threads = map(int, numbers)
    sentences = [line.split() for line in Path(text).read_text(encoding="utf-8").splitlines()]
    translators = {}
    for line in sys.stdin:
        precision = line.strip()
        if precision not in translators:
            translators[precision] = ctranslate2.Translator(model, compute_type=precision, intra_threads=threads)
        translators[precision].translate_batch(
            sentences,
            beam_size=beam,
            num_hypotheses=beam,
            min_decoding_length=steps - 1,
            max_decoding_length=steps - 1,
        )
        print(precision, flush=True)


if __name__ == "__main__":
    main()
