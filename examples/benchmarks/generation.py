#!/usr/bin/env python3
"""Time beam search of ConvS2S, the Weighted Transformer, and other models and programs.

The contestants have random weights and take turns: fairseq's fconv, fconv with cached linearised weights, convs2s with
fconv's weights, fairseq's transformer, the Weighted Transformer, and CTranslate2's Transformer if ctranslate2 is
installed.  (fairseq's fconv computes the linearised weights again at each step.)  CTranslate2 runs in a separate
process.  All models run with fairseq's generator and with the generator of the task translation_fast.  On a CPU, our
models run with translation_fast in each supported precision.  On a GPU, all contestants run in single and half
precision.  With --compile-steps, our models also run with compiled steps.  For each contestant except CTranslate2, the
script also prints the number of hypotheses that equal those of the same model in float32 with fairseq's generator.
"""

from __future__ import annotations

import copy
import statistics
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models import BaseFairseqModel
from fairseq.models.fconv import FConvModel
from fairseq.modules import LinearizedConvolution
from fairseq.sequence_generator import SequenceGenerator
from turns import (
    DEVICE,
    JSON,
    SIZES,
    build,
    compare,
    convert_for_ctranslate2,
    describe_sizes,
    fconv_and_convs2s,
    machine,
    make_dictionary,
    multiply_adds,
    parse_options,
    prepare,
    product_rate,
    random_sentences,
    ratio,
    take_turns,
    write_json,
)

from fairseq_plugins.cpu.packing import PRECISIONS, PackedWeightCache
from fairseq_plugins.search.generator import FastBeamSearch
from fairseq_plugins.search.graphs import GraphCache

OPTIONS = (
    *SIZES,
    ("sentences", 16, "sentences in a batch"),
    ("source-length", 25, "longest source sentence, in tokens"),
    ("beam", 5, "beam size"),
    ("steps", 25, "decoder steps"),
    ("compile-steps", False, "also time our models with compiled steps"),
    DEVICE,
    JSON,
)
PAUSE = 0.5  # seconds before each timed call; CTranslate2's threads keep a core busy for 0.2 s after a call
CONVS2S, WEIGHTED, COMPILED = "convs2s", "weighted_transformer_small", ", compiled"


def cache_linearized_weights(model: FConvModel) -> None:
    """Make fconv faster: cache the results of ``_get_linearized_weight``."""
    for module in model.modules():
        if isinstance(module, LinearizedConvolution):
            module._linearized_weight = module._get_linearized_weight()


@contextmanager
def ctranslate2_runs(
    model: BaseFairseqModel, options: Namespace, dictionary: Dictionary, source: torch.Tensor, args: Namespace
) -> Iterator[dict[str, Callable[[], None]]]:
    """Yield functions that translate with CTranslate2, one for each precision.

    Yield no functions on a GPU, or if ctranslate2 is not installed.
    """
    if args.device != "cpu" or not find_spec("ctranslate2"):
        yield {}
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for language in ("en", "de"):
            dictionary.save(str(folder / f"dict.{language}.txt"))
        settings = {**vars(options), "task": "translation", "source_lang": "en", "target_lang": "de"}
        torch.save({"args": Namespace(**settings), "model": model.state_dict()}, folder / "model.pt")
        convert_for_ctranslate2(folder / "model.pt", folder, folder / "converted")
        (folder / "text").write_text(
            "".join(dictionary.string(sentence) + "\n" for sentence in source), encoding="utf-8"
        )
        script = Path(__file__).with_name("ctranslate2_turns.py")
        command = [sys.executable, script, folder / "converted", folder / "text", args.beam, args.steps, args.threads]
        with Popen(list(map(str, command)), stdin=PIPE, stdout=PIPE, bufsize=0) as process:

            def translate(precision: str) -> None:
                assert process.stdin
                assert process.stdout
                line = f"{precision}\n".encode()
                try:
                    process.stdin.write(line)
                    answer = process.stdout.readline()
                except BrokenPipeError:
                    answer = b""
                if answer != line:
                    sys.exit("CTranslate2's process has failed; see its output above")

            yield {f"CTranslate2, {precision}": partial(translate, precision) for precision in ("float32", "int8")}


def searches(
    name: str, model: BaseFairseqModel, dictionary: Dictionary, sample: dict[str, Any], args: Namespace
) -> dict[str, Callable[[], Any]]:
    """Return the searches of a model: fairseq's generator, and translation_fast, for our models in each precision."""
    # Random models hardly ever end a sentence, so all hypotheses have the maximum length.
    options = {"beam_size": args.beam, "max_len_b": args.steps - 1, "min_len": args.steps - 1}
    runs = {name: partial(SequenceGenerator([model], dictionary, **options).generate, None, sample)}
    is_ours = name.startswith((CONVS2S, WEIGHTED))
    if args.device != "cpu":  # packed weights exist only on CPUs
        precisions = {"": "float32"}
    else:
        supported = [each for each, (_, is_supported) in PRECISIONS.items() if is_supported()]
        precisions = {f", {each}": each for each in supported if is_ours or each == "float32"}
    for suffix, precision in precisions.items():
        search = partial(FastBeamSearch, [model], dictionary, weight_cache=PackedWeightCache(precision), **options)
        fast = f"{name}, translation_fast{suffix}"
        runs[fast] = partial(search().generate, None, sample)
        if args.compile_steps and is_ours:
            runs[fast + COMPILED] = partial(search(graphs=GraphCache()).generate, None, sample)
    return runs


def main() -> None:
    args = parse_options(__doc__, OPTIONS)
    dictionary = make_dictionary(args.vocabulary)
    layers = f"[({args.width}, {args.kernel})] * {args.layers}"
    sizes = {"encoder_layers": layers, "decoder_layers": layers}
    shipped, convs2s = fconv_and_convs2s("fconv_wmt_en_ro", dictionary, **sizes)
    cached = build("fconv_wmt_en_ro", dictionary, **sizes)[1]
    cached.load_state_dict(shipped.state_dict())
    depth = args.transformer_layers
    sizes = {"encoder_layers": depth, "decoder_layers": depth, "share_all_embeddings": True}
    options, theirs = build("transformer", dictionary, **sizes)
    weighted = build(WEIGHTED, dictionary, **sizes)[1]
    models = {
        "fconv, as shipped": shipped,
        "fconv, weights cached": cached,
        CONVS2S: convs2s,
        "transformer": theirs,
        WEIGHTED: weighted,
    }
    for model in models.values():
        prepare(model, args.beam)
    if args.device != "cpu":
        models |= {f"{name}, float16": copy.deepcopy(model).half() for name, model in models.items()}
    source, lengths = random_sentences(dictionary, args.sentences, args.source_length, args.device)
    sample = {"net_input": {"src_tokens": source, "src_lengths": lengths}}
    runs: dict[str, Callable[[], Any]] = {}
    for name, model in models.items():
        model.to(args.device)
        if "cached" in name:
            cache_linearized_weights(model)
        runs |= searches(name, model, dictionary, sample, args)
    rate = product_rate(args.sentences * args.beam, args.device)
    with ctranslate2_runs(theirs, options, dictionary, source, args) as others:
        runs |= others
        seconds, hypotheses = take_turns(runs, args.rounds, pause=PAUSE if others else 0)

    print(describe_sizes(args))
    print(f"{args.sentences} sentences, beam {args.beam}, {args.steps} steps, source of {args.source_length} tokens")
    print(f"{machine(args)}; a float32 product of the decoder runs at {rate / 1e9:.0f} GFLOPS\n")
    print("| | seconds | products alone | speed (fconv as shipped = 1) | hypotheses equal | score differs |")
    print("|---|---|---|---|---|---|")
    rows, wrong = [], []
    for name in runs:
        faster = ratio(seconds["fconv, as shipped"], seconds[name])
        row = {"contestant": name, "seconds": seconds[name], "speed (fconv as shipped = 1)": faster}
        alone, check = "", "|"
        if "CTranslate2" not in name:
            reference = CONVS2S if "conv" in name else WEIGHTED if name.startswith(WEIGHTED) else "transformer"
            equal, pairs, difference = compare(hypotheses[reference], hypotheses[name])
            check = f"{equal} of {pairs} | {difference:.1e}"
            if equal < pairs and not any(low in name for low in ("float16", "int8")):
                wrong.append(name)
            row |= {"equal": equal, "of": pairs, "scores differ by": difference}
            if ", float16" not in name:  # product_rate measures only float32
                row["products alone"] = multiply_adds(runs[name.removesuffix(COMPILED)]) * 2 / rate
                alone = f"{row['products alone']:.2f}"
        print(f"| {name} | {statistics.median(seconds[name]):.3f} | {alone} | {faster:.2f} | {check} |")
        rows.append(row)
    write_json(args, rows)
    if wrong:
        sys.exit(f"{', '.join(wrong)}: hypotheses differ, so the speeds above mean nothing")


if __name__ == "__main__":
    main()
