"""Search with packed weights in each precision: scores, changed weights, copies, and speed."""

from __future__ import annotations

import copy
import functools
import statistics
import time
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch

from fairseq_plugins.cpu.packing import PRECISIONS, PackedWeightCache
from fairseq_plugins.search.generator import FastBeamSearch
from tests.search.searching import LENGTHS, assert_same, generate


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
@pytest.mark.parametrize("options", [{}, {"no_repeat_ngram_size": 2}], ids=["own search", "fairseq's search"])
def test_lower_precision(build, architecture, dictionary, sentences, device, precision: str, options: dict) -> None:
    """Scores differ from float32 by rounding."""
    if device.type != "cpu":
        pytest.skip("for processors")
    if not PRECISIONS[precision][1]():
        pytest.skip(f"this processor has no {precision}")
    source = sentences([60, 40, 60, 20])
    found = [
        generate(
            FastBeamSearch, [build(architecture)], dictionary, source, weight_cache=PackedWeightCache(each), **options
        )
        for each in ("float32", precision)
    ]
    scores = [{float(beam["score"]) for beam in chain(*each)} for each in found]
    assert not scores[0] & scores[1]


@pytest.mark.usefixtures("steps_of_convolutions")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_that_change_during_training(build, architecture, dictionary, sentences, precision) -> None:
    """Half-precision optimizers and averages of weights change weights through `.data`."""
    source = sentences(LENGTHS)
    sample = {"net_input": {"src_tokens": source, "src_lengths": source.ne(dictionary.pad()).sum(dim=1)}}
    trained, other = build(architecture, 1), build(architecture, 2)
    generator = FastBeamSearch(
        [trained], dictionary, weight_cache=PackedWeightCache(precision), beam_size=4, max_len_b=12
    )
    generator.generate([trained], sample)
    for parameter, value in zip(trained.parameters(), other.parameters(), strict=True):
        parameter.data.copy_(value.data)
    actual = generator.generate([trained], sample)
    assert_same(
        actual,
        generate(FastBeamSearch, [other], dictionary, source, weight_cache=PackedWeightCache(precision)),
        tolerance=0,
    )


WEIGHTED = {
    "kappa and alpha": {},
    "their logits": {"branch_constraint": "softmax"},
    "kappa and a gate": {"branch_gating_topk": 2},
}


@pytest.mark.parametrize("weights", WEIGHTED)
@torch.no_grad()
def test_folded_weights(build, dictionary, sentences, weights: str) -> None:
    """A model in training and its unchanged copy share a cache, but each uses its own weights."""
    options = {"encoder_layers": 1, "decoder_layers": 1, **WEIGHTED[weights]}
    trained, other = (build("weighted_transformer_tiny", seed, **options) for seed in (1, 2))
    kept, weight_cache = copy.deepcopy(trained), PackedWeightCache()
    search = functools.partial(generate, FastBeamSearch, dictionary=dictionary, source=sentences([5, 3]), max_len_b=4)
    search([trained], weight_cache=weight_cache)
    first = search([kept], weight_cache=PackedWeightCache())
    for name in [name for name, _ in trained.named_parameters() if "branches" in name]:
        trained.get_parameter(name).data.copy_(other.get_parameter(name).data)
        # The copy is used first, and finds the cache entries of its original.
        assert_same(search([kept], weight_cache=weight_cache), first, tolerance=0)
        assert_same(
            search([trained], weight_cache=weight_cache),
            search([trained], weight_cache=PackedWeightCache()),
            tolerance=0,
        )


# Products take most of the time in models of this width.
WIDE = {f"{side}_layers": "[(512, 3)] * 3" for side in ("encoder", "decoder")}
WIDE |= {f"{side}_embed_dim": 512 for side in ("encoder", "decoder", "decoder_out")}


def faster(plain: Callable[[], Any], fast: Callable[[], Any], turns: int = 3) -> float:
    """Return the median ratio of the first call's CPU time to the second's, after one turn to warm up."""
    ratios = []
    for turn in range(-1, turns):
        seconds = []
        for call in (plain, fast):
            began = time.process_time()
            call()
            seconds.append(time.process_time() - began)
        if turn >= 0:
            ratios.append(seconds[0] / seconds[1])
    print(ratios)
    return statistics.median(ratios)


@pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="this processor has no instructions for int8")
def test_the_search_in_int8(build, dictionary, sentences) -> None:
    source = sentences([20] * 16).cpu()
    sample = {"net_input": {"src_tokens": source, "src_lengths": source.ne(dictionary.pad()).sum(dim=1)}}
    lengths = {"beam_size": 5, "max_len_b": 8, "min_len": 8}
    plain, fast = (
        FastBeamSearch(
            [build("convs2s_tiny", **WIDE).cpu()], dictionary, weight_cache=PackedWeightCache(precision), **lengths
        )
        for precision in ("float32", "int8")
    )
    assert faster(lambda: plain.generate(None, sample), lambda: fast.generate(None, sample)) > 1.1


@pytest.mark.skipif(not PRECISIONS["bfloat16"][1](), reason="this processor has no instructions for bfloat16")
def test_training_in_bfloat16(build, sentences) -> None:
    source, target = sentences([20] * 16).cpu(), sentences([19] * 16).cpu()

    def update(model: Any) -> Callable[[], None]:
        return lambda: model(source, None, target)[0].float().square().mean().backward()

    model = build("convs2s_tiny", **WIDE).cpu().train()
    assert faster(update(model), update(copy.deepcopy(model).bfloat16())) > 1.2
