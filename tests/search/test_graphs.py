"""Tests that require a GPU: replayed CUDA graphs, no synchronisation, and half precision."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator

from fairseq_plugins.search.beam_search import TokenRules
from fairseq_plugins.search.generator import FastBeamSearch
from fairseq_plugins.search.graphs import GraphCache
from tests.search.searching import assert_same

BEAM, STEPS = 3, 9


@pytest.fixture(autouse=True)
def _needs_a_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("needs a GPU: run with --device cuda")


def launches(step: Any) -> tuple[int, int]:
    """Return the number of graphs and of single kernels that a call launches."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    return sum("GraphLaunch" in name for name in names), sum("LaunchKernel" in name for name in names)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_forced_words(build, architecture, sentences, dictionary, dtype: torch.dtype) -> None:
    """Replayed steps round like other steps, and synchronise only for the first batch of a shape."""
    model = build(architecture).to(dtype)
    model.make_generation_fast_(need_attn=True)
    exact = copy.deepcopy(model).double()
    graphs, seen = GraphCache(), set[tuple[int, ...]]()
    for lengths in ([9, 5, 3], [4, 7, 2, 2], [40], [12, 12, 11]):
        source, words = sentences(lengths), sentences([STEPS + 1] * len(lengths), seed=2)
        results: list[list[torch.Tensor]] = []
        for kind in (graphs, None, exact):
            search = FastBeamSearch([exact if kind is exact else model], dictionary, beam_size=BEAM, max_len_b=STEPS)
            rules = TokenRules.from_generator(search, source, words)
            if kind is graphs:
                with graphs.search(model, search.begin, source, rules) as (beams, step):
                    torch.cuda.set_sync_debug_mode("error" if beams.back_pointers.shape in seen else "default")
                    try:
                        for _ in range(STEPS):
                            step()
                    finally:
                        torch.cuda.set_sync_debug_mode("default")
                    seen.add(beams.back_pointers.shape)
                    found = beams.scores.clone(), beams.attention.clone()
            else:
                beams = search.begin({"src_tokens": source, "src_lengths": None}, rules)
                for _ in range(STEPS):
                    beams.prepare_and_step()
                found = beams.scores, beams.attention
            # Only the first hypothesis of each sentence is forced to these words.
            scores, attention = (part[:STEPS].double() for part in found)
            first = attention[:, : len(lengths) * BEAM : BEAM, : source.size(1)]
            results.append([scores[:, : len(lengths), :1].diff(dim=0), first])
        for mine, theirs, expected in zip(*results, strict=True):
            mine, theirs = ((each - expected).norm(dim=-1) for each in (mine, theirs))
            least = 1e-7 * expected.norm()
            # Attention may be a difference of large numbers, so its rounding errors may differ by a factor of ten.
            assert mine.norm() <= (16 if dtype == torch.float32 else 4) * theirs.norm() + 10 * least
            assert ((mine + least) / (theirs + least)).log().clamp(min=-1).mean() <= math.log(4)
    with graphs.search(model, search.begin, source, rules) as (_, step):
        graphs, kernels = launches(step)
    assert (graphs, kernels) == (1, 0)


def scored(exact: Any, source: torch.Tensor, found: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the double-precision score of each best hypothesis, and the largest error of its words' scores."""
    scores, differences = [], []
    for sentence, beams in zip(source, found, strict=True):
        for beam in beams:
            words = beam["tokens"].unsqueeze(0)
            logits, _ = exact(sentence.unsqueeze(0), None, words.roll(1, dims=1))  # rolling puts the end first
            expected = logits.log_softmax(dim=-1).gather(2, words.unsqueeze(2)).flatten()
            differences.append(beam["positional_scores"] - expected)
            if beam is beams[0]:
                scores.append(expected.mean())
    return torch.stack(scores), torch.cat(differences).square().mean().sqrt()


@torch.no_grad()
@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_searches_in_half_precision(build, architecture, sentences, dictionary, dtype, compiles: bool) -> None:
    """Rounding errors are similar to fairseq's; fairseq may find other words, but hardly better ones."""
    model, source = build(architecture).to(dtype), sentences([9, 3, 6, 1])
    exact = copy.deepcopy(model).double()
    model.make_generation_fast_()
    sample = {"net_input": {"src_tokens": source, "src_lengths": source.ne(1).sum(dim=1)}}
    options = {"beam_size": BEAM, "max_len_b": 12}
    theirs, rounding = scored(exact, source, SequenceGenerator([model], dictionary, **options).generate(None, sample))
    search = FastBeamSearch([model], dictionary, graphs=GraphCache() if compiles else None, **options)
    mine, own_rounding = scored(exact, source, search.generate(None, sample))
    assert own_rounding <= 4 * rounding
    assert (mine >= theirs - 4 * rounding).all()


@pytest.mark.parametrize("compiles", [False, True])
def test_a_search_is_read_every_fourth_step(build, architecture, sentences, dictionary, compiles: bool) -> None:
    """Nine steps are read twice by waiting for an event, which torch does not count; then the results are read."""
    model, source = build(architecture).double(), sentences([9, 3, 6, 1])
    model.make_generation_fast_()
    sample = {"net_input": {"src_tokens": source, "src_lengths": source.ne(1).sum(dim=1)}}
    options = {"beam_size": BEAM, "min_len": 8, "max_len_b": 8}
    expected = SequenceGenerator([model], dictionary, **options).generate([model], sample)
    search = FastBeamSearch([model], dictionary, graphs=GraphCache() if compiles else None, **options)
    search.generate([model], sample)  # compiles the search
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            actual = search.generate([model], sample)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(actual, expected, 1e-5)
    looks = [each for each in caught if "synchronizing" in str(each.message)]
    # Synchronisations: back-pointers and scores to the host, token rules to the device, words and scores back to it.
    assert len(looks) <= 10, [f"{each.filename}:{each.lineno}" for each in looks]
