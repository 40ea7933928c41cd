#!/usr/bin/env python3
"""Time training of ConvS2S and the Weighted Transformer against fairseq's fconv and transformer of the same sizes.

The contestants of a row take turns in one process, with random weights.  convs2s computes the function of fconv, so the
losses without dropout are compared.  The Weighted Transformer is not a Transformer, so its folded branches are
compared with the paper's unfolded equations.
"""

from __future__ import annotations

import statistics
import sys
from functools import partial

import torch
from fairseq.criterions.label_smoothed_cross_entropy import label_smoothed_nll_loss
from fairseq.models import BaseFairseqModel
from fairseq.optim.adam import Adam
from torch import Tensor
from turns import (
    DEVICE,
    build,
    fconv_and_convs2s,
    machine,
    make_dictionary,
    parse_options,
    random_sentences,
    ratio,
    take_turns,
)

from fairseq_plugins.weighted_transformer.branches import BranchedBlock

OPTIONS = (
    ("vocabulary", 32000, "words"),
    ("sentences", 64, "sentences in a batch"),
    ("length", 25, "longest sentence, in tokens"),
    DEVICE,
)
Batch = tuple[Tensor, Tensor, Tensor]


def loss_of(model: BaseFairseqModel, batch: Batch) -> Tensor:
    """Return the label-smoothed cross-entropy."""
    source, lengths, target = batch
    log_probabilities = model.get_normalized_probs(model(source, lengths, target.roll(1, dims=1)), log_probs=True)
    return label_smoothed_nll_loss(log_probabilities.flatten(0, 1), target.flatten(), 0.1, ignore_index=1)[0]


def update(model: BaseFairseqModel, optimizer: Adam, batch: Batch) -> None:
    """Make a complete update."""
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()


def through_the_layers(model: BaseFairseqModel, _: Adam, batch: Batch) -> None:
    """Run forward and backward without the output layer and Adam, whose work is half for the embeddings."""
    model.zero_grad()
    source, lengths, target = batch
    encoded = model.encoder(source, src_lengths=lengths)
    model.decoder.extract_features(target.roll(1, dims=1), encoder_out=encoded)[0].square().sum().backward()


@torch.no_grad()
def evaluate(model: BaseFairseqModel, batch: Batch) -> float:
    """Return the loss without dropout."""
    model.eval()
    loss = float(loss_of(model, batch))
    model.train()
    return loss


def evaluate_plainly(model: BaseFairseqModel, batch: Batch) -> float:
    """Return the loss without dropout by the paper's unfolded equations."""
    forward = BranchedBlock.forward
    BranchedBlock.forward = BranchedBlock.plain  # type: ignore[method-assign]
    try:
        return evaluate(model, batch)
    finally:
        BranchedBlock.forward = forward  # type: ignore[method-assign]


def main() -> None:
    args = parse_options(__doc__, OPTIONS)
    dictionary = make_dictionary(args.vocabulary)
    source, lengths = random_sentences(dictionary, args.sentences, args.length, args.device)
    batch = (source, lengths, random_sentences(dictionary, args.sentences, args.length, args.device)[0])
    print(f"{args.sentences} pairs of up to {args.length} tokens, vocabulary {args.vocabulary}, Adam")
    print(f"{machine(args)}\n")
    print("| | fairseq, ms | ours, ms | faster | losses differ by |")
    print("|---|---|---|---|---|", flush=True)
    wrong = False
    shared = {"share_all_embeddings": True, "attention_dropout": 0.1}
    for name, pair in {
        "fconv_iwslt_de_en, an update": lambda: fconv_and_convs2s("fconv_iwslt_de_en", dictionary),
        "fconv_wmt_en_ro (20+20 layers of 512), an update": lambda: fconv_and_convs2s("fconv_wmt_en_ro", dictionary),
        "transformer (6+6 layers of 512/2048), an update": lambda: (
            build("transformer", dictionary, **shared)[1],
            build("weighted_transformer_small", dictionary, **shared)[1],
        ),
        "the same, its layers alone": None,
    }.items():
        what = update if pair else through_the_layers
        if pair:
            theirs, ours = (model.to(args.device).train() for model in pair())
            expected = evaluate_plainly(ours, batch) if "transformer" in name else evaluate(theirs, batch)
            error = abs(evaluate(ours, batch) - expected) / expected
            wrong = wrong or error > 1e-5
        runs = {
            side: partial(what, model, Adam(model.parameters(), lr=1e-4), batch)
            for side, model in (("theirs", theirs), ("ours", ours))
        }
        seconds, _ = take_turns(runs, args.rounds)
        print(
            f"| {name} | {1000 * statistics.median(seconds['theirs']):.0f} | "
            f"{1000 * statistics.median(seconds['ours']):.0f} | {ratio(seconds['theirs'], seconds['ours']):.2f} | "
            f"{error:.0e} |",
            flush=True,
        )
    if wrong:
        sys.exit("the losses differ, so the speeds above mean nothing")


if __name__ == "__main__":
    main()
