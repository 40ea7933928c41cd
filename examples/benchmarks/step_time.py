#!/usr/bin/env python3
"""Time decoding steps at several output lengths; steps become slower if a model's state grows.

fairseq's fconv, convs2s with the same weights, fairseq's transformer and the Weighted Transformer take turns.  All
models have random weights and decode random tokens; hypotheses are reordered at each step.  The last predictions are
compared with predictions computed without incremental state.
"""

from __future__ import annotations

import statistics
import sys
import time
from argparse import Namespace
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models import BaseFairseqModel
from torch import Tensor
from tqdm import tqdm
from turns import (
    JSON,
    build,
    fconv_and_convs2s,
    machine,
    make_dictionary,
    parse_options,
    prepare,
    random_sentences,
    write_json,
)

OPTIONS = (
    ("layers", 4, "number of layers of 512 units in encoder and in decoder (Transformers: 512/2048)"),
    ("vocabulary", 4000, "words"),
    ("sentences", 4, "sentences in a batch"),
    ("source-length", 25, "longest source sentence, in tokens"),
    ("beam", 5, "beam size"),
    ("length", 1024, "steps"),
    JSON,
)
LAST = 16  # steps in the median of each column; for example, column 64 has the median of steps 49 to 64


def make_models(args: Namespace, dictionary: Dictionary) -> dict[str, BaseFairseqModel]:
    """Build all contestants, and return them by name."""
    # fconv's longest output is two tokens shorter than max_target_positions.
    longest = {"max_target_positions": args.length + 2}
    layers = f"[(512, 3)] * {args.layers}"
    sizes = {"encoder_layers": layers, "decoder_layers": layers, **longest}
    models = dict(zip(("fconv", "convs2s"), fconv_and_convs2s("fconv_wmt_en_ro", dictionary, **sizes), strict=True))
    for name in ("transformer", "weighted_transformer_small"):
        models[name] = build(name, dictionary, encoder_layers=args.layers, decoder_layers=args.layers, **longest)[1]
    for model in models.values():
        prepare(model, args.beam)
    return models


class Decoding:
    """A batch that one model decodes step by step."""

    def __init__(self, model: BaseFairseqModel, source: Tensor, lengths: Tensor, rows: Tensor) -> None:
        self.decoder = model.decoder
        self.encoded = model.encoder.reorder_encoder_out(model.encoder(source, lengths), rows)
        self.state: dict[str, Any] = {}
        self.seconds: list[float] = []

    def step(self, tokens: Tensor, order: Tensor) -> None:
        """Decode the last tokens after reordering the rows of the state."""
        start = time.perf_counter()
        if self.state:
            self.decoder.reorder_incremental_state_scripting(self.state, order)
        self.logits = self.decoder(tokens, self.encoded, incremental_state=self.state)[0]
        self.seconds.append(time.perf_counter() - start)

    def difference(self, tokens: Tensor) -> float:
        """Return the largest difference of the last step's logits from logits computed without incremental state."""
        return float((self.logits[:, -1] - self.decoder(tokens, self.encoded)[0][:, -1]).abs().max())


def decode(models: dict[str, BaseFairseqModel], args: Namespace, dictionary: Dictionary) -> dict[str, Decoding]:
    """Decode the same tokens with all models in turns, and check their last predictions."""
    source, lengths = random_sentences(dictionary, args.sentences, args.source_length)
    rows = torch.arange(args.sentences).repeat_interleave(args.beam)
    decodings = {name: Decoding(model, source, lengths, rows) for name, model in models.items()}
    tokens = torch.empty(len(rows), 0, dtype=torch.long)
    for _ in tqdm(range(args.length), desc="steps", leave=False):
        order = rows * args.beam + torch.randint(args.beam, (len(rows),))
        new = torch.randint(dictionary.nspecial, len(dictionary), (len(rows), 1))
        tokens = torch.cat([tokens[order], new], dim=1)
        for decoding in decodings.values():
            decoding.step(tokens, order)
    if wrong := [name for name, decoding in decodings.items() if decoding.difference(tokens) > 1e-3]:
        sys.exit(f"{', '.join(wrong)}: predictions with and without state differ, so the times mean nothing")
    return decodings


@torch.no_grad()
def main() -> None:
    args = parse_options(__doc__, OPTIONS)
    dictionary = make_dictionary(args.vocabulary)
    models = make_models(args, dictionary)
    rounds = [decode(models, args, dictionary) for _ in range(args.rounds)]
    shown = [2**power for power in range(4, 11) if 2**power <= args.length]
    print(f"{args.layers}+{args.layers} layers of 512, vocabulary {args.vocabulary}")
    print(f"{args.sentences} sentences of up to {args.source_length} tokens, beam {args.beam}")
    print(f"{machine(args)}\n")
    print("| milliseconds of step | " + " | ".join(map(str, shown)) + " |")
    print("|---|" + "---|" * len(shown))
    rows = []
    for name in models:
        steps = [statistics.median(times) for times in zip(*(each[name].seconds for each in rounds), strict=True)]
        times = [1000 * statistics.median(steps[step - LAST : step]) for step in shown]
        print(f"| {name} | " + " | ".join(f"{each:.1f}" for each in times) + " |")
        rows.append({"contestant": name, "milliseconds": dict(zip(shown, times, strict=True))})
    write_json(args, rows)


if __name__ == "__main__":
    main()
