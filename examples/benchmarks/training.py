#!/usr/bin/env python3
"""Time training updates of our models and of fairseq's models of the same sizes, in float32 and in bfloat16.

An update does the same as fairseq-train for one batch: loss, gradients, norm of the gradients, and Adam.  fairseq's
models are trained without this plugin's changes, and only in float32, because --bf16 on a CPU needs these changes.  Our
models are trained with the plugin's dropout, loss and Adam.  The contestants of a row take turns in one process, with
random weights and the memory settings of a training.

In each row, our model's loss without dropout is compared with a reference.  For convs2s, the reference is the loss of
fconv with the same weights.  For the Weighted Transformer, the reference is a direct computation of the paper's
equations.  For the model with LSTMs, the reference is the loss that is computed by decoding one step at a time.
"""

from __future__ import annotations

import copy
import inspect
import statistics
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.data import Dictionary
from fairseq.dataclass.configs import FairseqConfig
from fairseq.models import BaseFairseqModel
from fairseq.optim import FairseqOptimizer, FP16Optimizer, build_optimizer
from fairseq.optim.adam import Adam
from omegaconf import OmegaConf
from turns import (
    DEVICE,
    JSON,
    build,
    fconv_and_convs2s,
    machine,
    make_dictionary,
    parse_options,
    random_sentences,
    ratio,
    take_turns,
    write_json,
)

from fairseq_plugins.cpu.packing import PRECISIONS
from fairseq_plugins.weighted_transformer.branches import BranchedBlock

OPTIONS = (
    ("vocabulary", 32000, "words"),
    ("sentences", 64, "sentences in a batch"),
    ("length", 25, "longest sentence, in tokens"),
    DEVICE,
    JSON,
)
ADAM = {"_name": "adam", "adam_betas": "(0.9, 0.98)", "adam_eps": 1e-8, "weight_decay": 0.0, "lr": [1e-4], "tpu": False}
Sample = dict[str, Any]


class PlainAdam(Adam):
    """fairseq's Adam without this plugin's changes."""

    step = inspect.unwrap(Adam.step)


class PlainCriterion(LabelSmoothedCrossEntropyCriterion):
    """fairseq's loss without this plugin's changes."""

    compute_loss = inspect.unwrap(LabelSmoothedCrossEntropyCriterion.compute_loss)


def training_of(model: BaseFairseqModel, criterion: LabelSmoothedCrossEntropyCriterion, bfloat16: bool) -> Callable:
    """Return a function that updates the model with a sample, as fairseq's trainer does."""
    parameters = [each for each in model.parameters() if each.requires_grad]
    optimizer: FairseqOptimizer
    if bfloat16:
        cfg = OmegaConf.structured(FairseqConfig)
        cfg.common.bf16 = True
        cfg.optimizer = OmegaConf.create(ADAM)
        optimizer = FP16Optimizer.build_optimizer(cfg, list(model.bfloat16().parameters()))
    else:
        optimizer = build_optimizer(OmegaConf.create(ADAM), parameters)
    if isinstance(criterion, PlainCriterion):
        optimizer._optimizer = PlainAdam(parameters, **optimizer.optimizer_config)

    def update(sample: Sample) -> None:
        optimizer.zero_grad()
        optimizer.backward(criterion(model, sample)[0])
        optimizer.multiply_grads(1 / sample["ntokens"])
        optimizer.clip_grad_norm(1.0)
        optimizer.step()

    return update


@torch.no_grad()
def evaluate(model: BaseFairseqModel, criterion: LabelSmoothedCrossEntropyCriterion, sample: Sample) -> float:
    """Return the loss without dropout."""
    model.eval()
    loss = float(criterion(model, sample)[0])
    model.train()
    return loss


def evaluate_plainly(model: BaseFairseqModel, criterion: LabelSmoothedCrossEntropyCriterion, sample: Sample) -> float:
    """Return the loss without dropout, computed directly from the Weighted Transformer's equations."""
    forward = BranchedBlock.forward
    BranchedBlock.forward = BranchedBlock.plain  # type: ignore[method-assign]
    try:
        return evaluate(model, criterion, sample)
    finally:
        BranchedBlock.forward = forward  # type: ignore[method-assign]


def evaluate_in_steps(model: BaseFairseqModel, criterion: LabelSmoothedCrossEntropyCriterion, sample: Sample) -> float:
    """Return the loss without dropout, computed by decoding step by step."""
    forward = model.decoder.forward
    model.decoder.forward = partial(forward, incremental_state={})
    try:
        return evaluate(model, criterion, sample)
    finally:
        model.decoder.forward = forward


def pairs(dictionary: Dictionary) -> dict[str, tuple[Callable[[], tuple[BaseFairseqModel, ...]], Callable | None]]:
    """Return the two models of each row, and a function for the reference loss (None: the loss of fairseq's model)."""
    shared = {"share_all_embeddings": True, "attention_dropout": 0.1}
    sizes = {f"{side}_embed_dim": 256 for side in ("encoder", "decoder")}
    sizes |= {f"{side}_hidden_size": 512 for side in ("encoder", "decoder")}
    lstm = {"criterion": "", "encoder_bidirectional": True, "decoder_out_embed_dim": 256, "dropout": 0.2, **sizes}
    return {
        "fconv_iwslt_de_en": (lambda: fconv_and_convs2s("fconv_iwslt_de_en", dictionary), None),
        "fconv_wmt_en_ro (20+20 layers of 512)": (lambda: fconv_and_convs2s("fconv_wmt_en_ro", dictionary), None),
        "transformer (6+6 layers of 512/2048)": (
            lambda: tuple(
                build(name, dictionary, **shared)[1] for name in ("transformer", "weighted_transformer_small")
            ),
            evaluate_plainly,
        ),
        "lstm (bidirectional, 512 units) and conv_encoder_bilstm": (
            lambda: (build("lstm", dictionary, **lstm)[1], build("conv_encoder_bilstm", dictionary)[1]),
            evaluate_in_steps,
        ),
    }


def main() -> None:
    args = parse_options(__doc__, OPTIONS, program="fairseq-train")
    dictionary = make_dictionary(args.vocabulary)
    source, lengths = random_sentences(dictionary, args.sentences, args.length, args.device)
    # fairseq sorts sentences by length in a batch, and its lstm needs this order.
    order = lengths.argsort(descending=True)
    source, lengths = source[order], lengths[order]
    target = random_sentences(dictionary, args.sentences, args.length, args.device)[0]
    inputs = {"src_tokens": source, "src_lengths": lengths, "prev_output_tokens": target.roll(1, dims=1)}
    sample = {"net_input": inputs, "target": target, "ntokens": int(target.ne(dictionary.pad()).sum())}
    task = SimpleNamespace(target_dictionary=dictionary)
    ours_loss, theirs_loss = (
        kind(task, sentence_avg=False, label_smoothing=0.1)
        for kind in (LabelSmoothedCrossEntropyCriterion, PlainCriterion)
    )
    print(f"an update of {args.sentences} pairs of up to {args.length} tokens, vocabulary {args.vocabulary}, Adam")
    print(f"{machine(args)}\n")
    print("| fairseq's model and ours | fairseq, ms | ours, ms | faster | bfloat16, ms | faster | losses differ by |")
    print("|---|---|---|---|---|---|---|", flush=True)
    rows, wrong = [], False
    for name, (make, check) in pairs(dictionary).items():
        theirs, ours = (model.to(args.device).train() for model in make())
        expected = check(ours, theirs_loss, sample) if check else evaluate(theirs, theirs_loss, sample)
        error = abs(evaluate(ours, ours_loss, sample) - expected) / expected
        wrong = wrong or error > 1e-5
        runs = {
            "fairseq": partial(training_of(theirs, theirs_loss, False), sample),
            "float32": partial(training_of(ours, ours_loss, False), sample),
        }
        if args.device != "cpu" or PRECISIONS["bfloat16"][1]():
            runs["bfloat16"] = partial(training_of(copy.deepcopy(ours), ours_loss, True), sample)
        seconds, _ = take_turns(runs, args.rounds)
        cells = [f"{1000 * statistics.median(seconds['fairseq']):.0f}"]
        row = {"model": name, "losses differ by": error, "seconds": seconds}
        for precision in ("float32", "bfloat16"):
            if precision not in seconds:
                cells += ["", ""]
                continue
            row[f"faster, {precision}"] = ratio(seconds["fairseq"], seconds[precision])
            cells += [f"{1000 * statistics.median(seconds[precision]):.0f}", f"{row[f'faster, {precision}']:.2f}"]
        print(f"| {name} | {' | '.join(cells)} | {error:.0e} |", flush=True)
        rows.append(row)
    write_json(args, rows)
    if wrong:
        sys.exit("losses differ, so the speeds above mean nothing")


if __name__ == "__main__":
    main()
