#!/usr/bin/env python3
"""Time training and beam search of the Weighted Transformer against fairseq's transformer of the same sizes.

The contestants take turns in one process, with random weights.  The two are different models, so each speed is checked
against a slower form of the same one: the folded branches against the paper's equations as they are written, and
decoding step by step against decoding each prefix anew.
"""

from __future__ import annotations

import statistics
import sys
from argparse import Namespace
from functools import partial
from types import SimpleNamespace

import torch
from fairseq.criterions.label_smoothed_cross_entropy import label_smoothed_nll_loss
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY, BaseFairseqModel
from fairseq.optim.adam import Adam
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor
from turns import compare, machine, make_dictionary, parse_options, random_sentences, ratio, take_turns, without_state

import fairseq_plugins  # noqa: F401  (registers the architecture)
from fairseq_plugins.nn.branched_block import BranchedBlock

OPTIONS = (
    ("layers", 6, "layers in encoder and decoder"),
    ("width", 512, "d_model"),
    ("ffn-width", 2048, "d_ff"),
    ("heads", 8, "heads and branches"),
    ("vocabulary", 32000, "words"),
    ("train-sentences", 64, "sentences in a batch of training"),
    ("sentences", 16, "sentences in a batch of generation"),
    ("length", 25, "longest sentence, in tokens"),
    ("beam", 5, "beam size"),
    ("steps", 25, "decoder steps"),
)
THEIRS, OURS = "fairseq transformer", "weighted_transformer"


def build(architecture: str, args: Namespace, dictionary: Dictionary) -> BaseFairseqModel:
    """A random model of the sizes that the options say."""
    options = Namespace(
        arch=architecture,
        encoder_layers=args.layers,
        decoder_layers=args.layers,
        encoder_embed_dim=args.width,
        encoder_ffn_embed_dim=args.ffn_width,
        encoder_attention_heads=args.heads,
        decoder_attention_heads=args.heads,
        attention_dropout=0.1,
        share_all_embeddings=True,
        max_source_positions=1024,
        max_target_positions=1024,
    )
    ARCH_CONFIG_REGISTRY[architecture](options)
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    return ARCH_MODEL_REGISTRY[architecture].build_model(options, task)


def loss_of(model: BaseFairseqModel, batch: tuple[Tensor, Tensor, Tensor], output_layer: bool) -> Tensor:
    """Label-smoothed cross-entropy, or without the output layer the sum of the decoder's features."""
    source, lengths, target = batch
    previous = target.roll(1, dims=1)
    if not output_layer:
        encoded = model.encoder(source, src_lengths=lengths)
        return model.decoder.extract_features(previous, encoder_out=encoded)[0].square().sum()
    log_probabilities = model.get_normalized_probs(model(source, lengths, previous), log_probs=True)
    return label_smoothed_nll_loss(log_probabilities.flatten(0, 1), target.flatten(), 0.1, ignore_index=1)[0]


def update(model: BaseFairseqModel, optimizer: Adam, batch: tuple[Tensor, Tensor, Tensor]) -> None:
    """One update, all of it."""
    optimizer.zero_grad()
    loss_of(model, batch, output_layer=True).backward()
    optimizer.step()


def through_the_layers(model: BaseFairseqModel, optimizer: Adam, batch: tuple[Tensor, Tensor, Tensor]) -> None:
    """Forward and backward without the output layer, and without Adam, half of whose work is for the embeddings."""
    optimizer.zero_grad()
    loss_of(model, batch, output_layer=False).backward()


@torch.no_grad()
def folding_error(model: BaseFairseqModel, batch: tuple[Tensor, Tensor, Tensor]) -> float:
    """The relative difference of the loss between the folded form and the paper's equations."""
    model.eval()
    folded = float(loss_of(model, batch, output_layer=True))
    forward = BranchedBlock.forward
    BranchedBlock.forward = BranchedBlock.plain  # type: ignore[method-assign]
    plain = float(loss_of(model, batch, output_layer=True))
    BranchedBlock.forward = forward  # type: ignore[method-assign]
    model.train()
    return abs(folded - plain) / plain


def report(what: str, seconds: dict[str, list[float]], per: int, check: str) -> None:
    ours, theirs = (1000 * statistics.median(seconds[name]) / per for name in (OURS, THEIRS))
    print(f"{what:34}{theirs:12.1f}{ours:12.1f}{ratio(seconds[THEIRS], seconds[OURS]):9.2f}x   {check}", flush=True)


def main() -> None:
    args = parse_options(__doc__, OPTIONS)
    dictionary = make_dictionary(args.vocabulary)
    models = {
        THEIRS: build("transformer", args, dictionary),
        OURS: build("weighted_transformer_small", args, dictionary),
    }
    sizes = f"{args.layers}+{args.layers} layers of {args.width}/{args.ffn_width}, {args.heads} heads"
    print(f"{sizes}, vocabulary {args.vocabulary}")
    print(f"training: {args.train_sentences} pairs of up to {args.length} tokens, dropout 0.1, Adam")
    print(f"generation: {args.sentences} sentences, beam {args.beam}, {args.steps} steps")
    print(f"{machine(args)}\n")
    print(f"{'':34}{'fairseq, ms':>12}{'ours, ms':>12}{'faster':>10}   check")

    source, lengths = random_sentences(dictionary, args.train_sentences, args.length)
    batch = (source, lengths, random_sentences(dictionary, args.train_sentences, args.length)[0])
    error = folding_error(models[OURS], batch)
    optimizers = {name: Adam(model.parameters(), lr=1e-4) for name, model in models.items()}
    for what, train in (("an update", update), ("layer stack, forward and backward", through_the_layers)):
        seconds, _ = take_turns(
            {name: partial(train, model, optimizers[name], batch) for name, model in models.items()}, args.rounds
        )
        report(what, seconds, 1, f"folded and plain loss differ by {error:.0e}")

    source, lengths = random_sentences(dictionary, args.sentences, args.length)
    sample = {"net_input": {"src_tokens": source, "src_lengths": lengths}}
    generators = {}
    for name, model in models.items():
        model.eval()
        model.make_generation_fast_(beamable_mm_beam_size=args.beam, need_attn=False)
        # A random model hardly ever ends a sentence, so the longest length is also the length of every hypothesis.
        generators[name] = SequenceGenerator(
            [model], dictionary, beam_size=args.beam, max_len_b=args.steps - 1, min_len=args.steps - 1
        )
    seconds, hypotheses = take_turns(
        {name: partial(generator.generate, None, sample) for name, generator in generators.items()}, args.rounds
    )
    models[OURS].decoder.forward = without_state(models[OURS])
    equal, pairs, _ = compare(hypotheses[OURS], generators[OURS].generate(None, sample))
    report("a step of generation", seconds, args.steps, f"{equal} of {pairs} hypotheses as without state")
    if equal < pairs or error > 1e-5:
        sys.exit("results differ: the speeds above mean nothing")


if __name__ == "__main__":
    main()
