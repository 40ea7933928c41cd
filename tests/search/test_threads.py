"""Threads that share a model, with and without candidates, get the same results as alone and change nothing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from fairseq_plugins.cpu.packing import PRECISIONS, PackedLinear, PackedWeightCache
from fairseq_plugins.search.generator import FastBeamSearch
from fairseq_plugins.search.graphs import GraphCache
from fairseq_plugins.vocabulary.candidates import Candidates
from tests.search.searching import assert_same, fairseq_model, generate

THREADS = 8
MODES = ["float32", "int8", "graphs", "fairseq's model", "fairseq's search"]


def check(model: Any, dictionary: Any, sources: list[Tensor], mode: str, translations: int) -> None:
    """Run threads of which half use candidates, each thread its own."""
    precision = mode if mode in PRECISIONS else "float32"
    if not PRECISIONS[precision][1]():
        pytest.skip(f"this processor has no {precision}")
    graphs = None
    if mode == "graphs":  # weights in double precision are not packed, so batches reuse memory
        model, graphs = model.double(), GraphCache(lambda run: run, lambda step: step)
    options: dict[str, Any] = {"beam_size": 3, "max_len_b": 6, "graphs": graphs}
    if mode == "fairseq's search":
        options["len_penalty"], options["no_repeat_ngram_size"] = 0.5, 2
    generator = torch.Generator().manual_seed(1)
    candidates: list[Candidates | None] = [None] * (THREADS // 2)
    for _ in range(THREADS // 2):
        always = torch.rand(len(dictionary), generator=generator) < 0.5
        always[: dictionary.nspecial + 8] = True
        candidates.append(Candidates(torch.full((len(dictionary), 1), dictionary.pad()), always))
    shared = PackedWeightCache(precision)

    def translate(number: int, weight_cache: PackedWeightCache | None = None) -> Any:
        words, source = candidates[number % THREADS], sources[number % len(sources)]
        weight_cache = weight_cache or shared
        return generate(
            FastBeamSearch, [model], dictionary, source, candidates=words, weight_cache=weight_cache, **options
        )

    distinct = THREADS * len(sources)  # the lists' lengths have no common divisor
    expected = [translate(number, PackedWeightCache(precision)) for number in range(distinct)]
    parts = {name: id(part) for name, part in model.named_modules(remove_duplicate=False)}
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(translate, range(translations)))
    for number, actual in enumerate(found):
        assert_same(actual, expected[number % distinct], tolerance=0 if precision == "float32" else 1e-6)
    assert parts == {name: id(part) for name, part in model.named_modules(remove_duplicate=False)}


@pytest.mark.parametrize("mode", MODES)
def test_some_translations(build, task, device, sentences, dictionary, architecture, mode: str) -> None:
    model = fairseq_model("transformer_tiny", task).to(device) if mode == "fairseq's model" else build(architecture)
    sources = [sentences([count, 3], seed=count) for count in (4, 5, 9)]
    check(model, dictionary, sources, mode, 48)


def test_the_quantisation_engine_is_restored() -> None:
    """All threads share the quantisation engine, and packing wide layers changes it."""
    if not PRECISIONS["int8"][1]():
        pytest.skip("this processor has no int8")
    before = torch.backends.quantized.engine
    wide = torch.ones(2**11 + 1, 2**11)
    for rows in (2**11 + 1, 8):
        PackedLinear(wide[:rows], None, "int8")
        assert torch.backends.quantized.engine == before
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda rows: PackedLinear(wide[:rows], None, "int8"), [2**11 + 1, 8] * 8))
    assert torch.backends.quantized.engine == before


def test_threads_do_not_warn_for_each_other(build, sentences, dictionary, caplog) -> None:
    """A thread must not warn about --cpu-dtype because another thread has just ended its batch."""
    if not PRECISIONS["int8"][1]():
        pytest.skip("this processor has no int8")
    model, weight_cache, source = build("convs2s_tiny"), PackedWeightCache("int8"), sentences([5, 3])
    with ThreadPoolExecutor(THREADS) as pool:
        list(
            pool.map(
                lambda _: generate(FastBeamSearch, [model], dictionary, source, weight_cache=weight_cache), range(40)
            )
        )
    assert "--cpu-dtype" not in caplog.text
