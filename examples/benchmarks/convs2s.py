#!/usr/bin/env python3
"""Time beam search with ConvS2S against fairseq's fconv, with the same weights, through fairseq's own generator.

Three contestants take turns in one process: fconv as fairseq ships it, fconv with its linearised weights cached
(fairseq lays them out again at every step; a two-line repair), and convs2s.  Their hypotheses are compared before
anything is said about speed.
"""

from __future__ import annotations

import statistics
import sys
from argparse import Namespace
from functools import partial
from types import SimpleNamespace

from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, BaseFairseqModel
from fairseq.models.fconv import FConvModel
from fairseq.modules import LinearizedConvolution
from fairseq.sequence_generator import SequenceGenerator
from turns import compare, machine, make_dictionary, parse_options, random_sentences, ratio, take_turns

from fairseq_plugins.models.convs2s.from_fconv import convert_options, convert_parameters
from fairseq_plugins.models.convs2s.model import ConvS2SModel

OPTIONS = (
    ("layers", 20, "layers in encoder and decoder"),
    ("width", 512, "units of each layer"),
    ("kernel", 3, "kernel width"),
    ("vocabulary", 40000, "target words"),
    ("sentences", 16, "sentences in a batch"),
    ("source-length", 25, "longest source sentence, in tokens"),
    ("beam", 5, "beam size"),
    ("steps", 25, "decoder steps"),
)


def build_pair(args: Namespace) -> tuple[Dictionary, FConvModel, FConvModel, ConvS2SModel]:
    """A random fconv twice, and a convs2s with the same weights."""
    dictionary = make_dictionary(args.vocabulary)
    layers = f"[({args.width}, {args.kernel})] * {args.layers}"
    options = Namespace(
        arch="fconv_wmt_en_ro",
        encoder_layers=layers,
        decoder_layers=layers,
        max_source_positions=1024,
        max_target_positions=1024,
    )
    ARCH_CONFIG_REGISTRY[options.arch](options)
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    shipped, cached = (FConvModel.build_model(options, task) for _ in range(2))
    parameters = shipped.state_dict()
    cached.load_state_dict(parameters)
    ours = ConvS2SModel.build_model(Namespace(**convert_options(options, parameters)), task)
    ours.load_state_dict(convert_parameters(parameters))
    return dictionary, shipped, cached, ours


def prepare(model: BaseFairseqModel, beam: int) -> BaseFairseqModel:
    """What fairseq-generate does to a model before it translates."""
    model.make_generation_fast_(beamable_mm_beam_size=beam, need_attn=False)
    return model


def cache_linearized_weights(model: FConvModel) -> None:
    """The repair: keep what ``_get_linearized_weight`` computes."""
    for module in model.modules():
        if isinstance(module, LinearizedConvolution):
            module._linearized_weight = module._get_linearized_weight()


def main() -> None:
    args = parse_options(__doc__, OPTIONS)
    dictionary, shipped, cached, ours = build_pair(args)
    models = {
        "fairseq fconv, as shipped": prepare(shipped, args.beam),
        "fairseq fconv, linearised weights cached": prepare(cached, args.beam),
        "convs2s": prepare(ours, args.beam),
    }
    cache_linearized_weights(cached)
    generators = {
        # A random model hardly ever ends a sentence, so the longest length is also the length of every hypothesis.
        name: SequenceGenerator([model], dictionary, beam_size=args.beam, max_len_b=args.steps - 1)
        for name, model in models.items()
    }
    source, lengths = random_sentences(dictionary, args.sentences, args.source_length)
    sample = {"net_input": {"src_tokens": source, "src_lengths": lengths}}
    seconds, hypotheses = take_turns(
        {name: partial(generator.generate, None, sample) for name, generator in generators.items()}, args.rounds
    )

    layers = f"{args.layers}+{args.layers} layers of {args.width}, kernel {args.kernel}"
    print(f"{layers}, vocabulary {args.vocabulary}")
    print(f"{args.sentences} sentences, beam {args.beam}, {args.steps} steps, source of {args.source_length} tokens")
    print(f"{machine(args)}\n")
    ours_name, all_equal = "convs2s", True
    print(f"{'':42}{'ms/step':>9}{'convs2s is faster':>19}{'hypotheses equal':>18}{'score differs':>15}")
    for name in generators:
        equal, pairs, difference = compare(hypotheses[ours_name], hypotheses[name])
        all_equal = all_equal and equal == pairs
        print(
            f"{name:42}{1000 * statistics.median(seconds[name]) / args.steps:9.1f}"
            f"{ratio(seconds[name], seconds[ours_name]):18.2f}x{f'{equal} of {pairs}':>18}{difference:15.1e}"
        )
    if not all_equal:
        sys.exit("hypotheses differ: the speeds above mean nothing")


if __name__ == "__main__":
    main()
