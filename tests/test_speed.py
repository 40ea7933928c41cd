"""Lower precisions take less CPU time than float32 on CPUs with instructions for them.

Bounds are wide: a failure means that half of the speed is lost.  Exported programs are timed in tests/export.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fairseq_plugins.cpu.packing import PRECISIONS, PackedWeightCache
from fairseq_plugins.search.generator import FastBeamSearch

# Products take most of the time in models of this width.
LAYERS = {f"{side}_layers": "[(512, 3)] * 3" for side in ("encoder", "decoder")}
WIDTHS = {f"{side}_embed_dim": 512 for side in ("encoder", "decoder")}
HEADS = {f"{side}_ffn_embed_dim": 2048 for side in ("encoder", "decoder")}
MODELS: dict[str, dict[str, Any]] = {
    "convs2s_tiny": {**LAYERS, **WIDTHS, "decoder_out_embed_dim": 512},
    "weighted_transformer_tiny": {**WIDTHS, **HEADS},
}


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


@pytest.fixture
def wide(build, device: torch.device) -> Callable[[str], Any]:
    """Return a function that builds a wide model on a CPU."""
    if device.type != "cpu":
        pytest.skip("for processors")
    return lambda architecture: build(architecture, **MODELS[architecture])


@pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="this processor has no instructions for int8")
@pytest.mark.parametrize("architecture", MODELS)
def test_the_search_in_int8(wide, dictionary, sentences, architecture: str) -> None:
    source = sentences([20] * 16)
    sample = {"net_input": {"src_tokens": source, "src_lengths": source.ne(dictionary.pad()).sum(dim=1)}}
    lengths = {"beam_size": 5, "max_len_b": 8, "min_len": 8}
    plain, fast = (
        FastBeamSearch([wide(architecture)], dictionary, packing=PackedWeightCache(precision), **lengths)
        for precision in ("float32", "int8")
    )
    assert faster(lambda: plain.generate(None, sample), lambda: fast.generate(None, sample)) > 1.1


@pytest.mark.skipif(not PRECISIONS["bfloat16"][1](), reason="this processor has no instructions for bfloat16")
@pytest.mark.parametrize("architecture", MODELS)
def test_training_in_bfloat16(wide, sentences, architecture: str) -> None:
    source, target = sentences([20] * 16), sentences([19] * 16)

    def update(model: Any) -> Callable[[], None]:
        return lambda: model(source, None, target)[0].float().square().mean().backward()

    model = wide(architecture).train()
    assert faster(update(model), update(copy.deepcopy(model).bfloat16())) > 1.2
