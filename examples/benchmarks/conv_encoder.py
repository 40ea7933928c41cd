#!/usr/bin/env python3
"""Time training and beam search with the encoders of Gehring et al. 2016 and with ConvS2S.

The models have random weights and the paper's sizes for IWSLT'14 German-English.  The models take turns in one process.
The hypotheses of incremental decoding are compared with hypotheses computed without incremental state.
"""

from __future__ import annotations

import statistics
import sys
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from fairseq.models import BaseFairseqModel
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor
from turns import (
    DEVICE,
    build,
    compare,
    machine,
    make_dictionary,
    parse_options,
    random_sentences,
    take_turns,
    without_state,
)

import fairseq_plugins

fairseq_plugins.install()

OPTIONS = (
    ("source-vocabulary", 35882, "source words"),
    ("target-vocabulary", 24158, "target words"),
    ("train-sentences", 32, "sentences per training batch"),
    ("sentences", 16, "sentences per generation batch"),
    ("length", 25, "longest sentence, in tokens"),
    ("beam", 5, "beam size"),
    ("steps", 25, "decoder steps"),
    DEVICE,
)
MODELS: dict[str, dict[str, Any]] = {  # architecture and options of each model
    "pooling": {"architecture": "conv_encoder_pooling"},
    "convolutional 6/3": {"architecture": "conv_encoder_iwslt_de_en"},
    "convolutional 15/5": {"architecture": "conv_encoder_wmt_en_de"},
    "BiLSTM": {"architecture": "conv_encoder_bilstm"},
    "BiLSTM, 2 layers": {"architecture": "conv_encoder_bilstm", "encoder_lstm_layers": 2},
    "convs2s_iwslt_de_en": {"architecture": "convs2s_iwslt_de_en"},
}


def update(model: BaseFairseqModel, optimizer: torch.optim.SGD, batch: tuple[Tensor, Tensor, Tensor]) -> None:
    """Make a training update with cross-entropy and plain SGD."""
    source, lengths, target = batch
    optimizer.zero_grad()
    log_probabilities = model.get_normalized_probs(model(source, lengths, target.roll(1, dims=1)), log_probs=True)
    F.nll_loss(log_probabilities.flatten(0, 1), target.flatten(), ignore_index=1).backward()
    optimizer.step()


def main() -> None:
    args = parse_options(__doc__, OPTIONS)
    source_words, target_words = make_dictionary(args.source_vocabulary), make_dictionary(args.target_vocabulary)
    words = {"source": source_words, "target": target_words}
    models = {name: build(**words, **options)[1].to(args.device) for name, options in MODELS.items()}
    print(f"vocabularies of {args.source_vocabulary} source and {args.target_vocabulary} target words")
    print(f"training: {args.train_sentences} pairs of up to {args.length} tokens, dropout, SGD")
    print(f"generation: {args.sentences} sentences, beam {args.beam}, {args.steps} steps")
    print(f"{machine(args)}\n")

    source, lengths = random_sentences(source_words, args.train_sentences, args.length, args.device)
    target, _ = random_sentences(target_words, args.train_sentences, args.length, args.device)
    trainings = {
        name: partial(update, model, torch.optim.SGD(model.parameters(), lr=0.1), (source, lengths, target))
        for name, model in models.items()
    }
    training, _ = take_turns(trainings, args.rounds)

    source, lengths = random_sentences(source_words, args.sentences, args.length, args.device)
    sample = {"net_input": {"src_tokens": source, "src_lengths": lengths}}
    generators = {}
    for name, model in models.items():
        model.eval()
        model.make_generation_fast_(need_attn=False)
        # Random models hardly ever end a sentence, so all hypotheses have the maximum length.
        generators[name] = SequenceGenerator(
            [model], target_words, beam_size=args.beam, max_len_b=args.steps - 1, min_len=args.steps - 1
        )
    generation, hypotheses = take_turns(
        {name: partial(generator.generate, None, sample) for name, generator in generators.items()}, args.rounds
    )

    print(f"{'':22}{'training,':>16}{'generation,':>16}   same hypotheses")
    print(f"{'':22}{'target words/s':>16}{'source words/s':>16}   as without state")
    target_count, source_count = int(target.ne(target_words.pad()).sum()), int(lengths.sum())
    failed = False
    for name, model in models.items():
        model.decoder.forward = without_state(model)
        equal, pairs, difference = compare(hypotheses[name], generators[name].generate(None, sample))
        failed |= difference > 1e-4  # only scores are compared: hypotheses with close scores may be ranked differently
        trained = target_count / statistics.median(training[name])
        generated = source_count / statistics.median(generation[name])
        print(f"{name:22}{trained:16.0f}{generated:16.0f}   {equal} of {pairs}", flush=True)
    if failed:
        sys.exit("hypotheses with and without state differ, so the speeds above mean nothing")


if __name__ == "__main__":
    main()
