"""Compare step-by-step decoding with decoding all at once, for any family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

STATE = "decoding"


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 2e-2}[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@st.composite
def decodings(draw: st.DrawFn, options: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    """Draw a model's options, a padded batch, a beam size, and row orders that also remove finished sentences."""
    sentences, beam = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    left, orders = sentences, []
    for _ in range(draw(st.integers(1, 6))):
        stay = sorted(draw(st.sets(st.integers(0, left - 1), min_size=1)))
        orders.append([s * beam + draw(st.integers(0, beam - 1)) for s in stay for _ in range(beam)])
        left = len(stay)
    return {
        "options": draw(options),
        "lengths": draw(st.lists(st.integers(1, 9), min_size=sentences, max_size=sentences)),
        "left_pad": draw(st.booleans()),
        "beam": beam,
        "orders": orders,
        "prepared": draw(st.booleans()),
        "dtype": draw(st.sampled_from([torch.float32, torch.float64])),
    }


@st.composite
def reorders(draw: st.DrawFn) -> tuple[int, int, int, list[list[torch.Tensor]]]:
    """Draw the numbers of sentences and hypotheses, a window width, and the re-orders before each step."""
    sentences, beam, width = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 5))
    left, steps = sentences, []
    for _ in range(draw(st.integers(1, 8))):
        orders = []
        for _ in range(draw(st.integers(0, 2))):
            stay = draw(st.permutations(range(left)))[: draw(st.integers(1, left))]
            stay = stay if len(stay) < left else range(left)
            rows = [s * beam + draw(st.integers(0, beam - 1)) for s in stay for _ in range(beam)]
            orders.append(torch.tensor(rows))
            left = len(stay)
        steps.append(orders)
    return sentences, beam, width, steps


@torch.no_grad()
def check_stepwise_equals_full(
    build: Callable[..., Any],
    sentences: Callable[..., torch.Tensor],
    architecture: str,
    decoding: dict[str, Any],
    check_state: Callable[..., None],
) -> None:
    """Compare outputs and attention at each step; call ``check_state(decoding, reference, tokens, source)``."""
    model = build(architecture, **decoding["options"]).to(decoding["dtype"])
    reference = build(architecture, **decoding["options"]).to(decoding["dtype"])
    if decoding["prepared"]:
        model.make_generation_fast_(need_attn=True)
    beam, words = decoding["beam"], len(model.decoder.dictionary)
    source = sentences(decoding["lengths"], decoding["left_pad"])
    expanded = torch.arange(len(source), device=source.device).repeat_interleave(beam)
    encoded = model.encoder.reorder_encoder_out(model.encoder(source), expanded)
    everything = reference.encoder(source)  # not re-ordered: rows are selected below

    torch.manual_seed(2)
    sentence = expanded
    tokens = torch.randint(4, words, (len(expanded), 1), device=source.device)
    state: dict[str, Any] = {}
    for new_order in [None, *decoding["orders"]]:
        if new_order is not None:
            order = torch.tensor(new_order, device=source.device)
            model.decoder.reorder_incremental_state_scripting(state, order)
            encoded = model.encoder.reorder_encoder_out(encoded, order)
            new = torch.randint(4, words, (len(order), 1), device=source.device)
            sentence, tokens = sentence[order], torch.cat([tokens[order], new], dim=1)
        logits, extra = model.decoder(tokens, encoded, incremental_state=state)
        seen = everything.select(sentence)
        expected, expected_extra = reference.decoder(tokens, seen)
        close(logits, expected[:, -1:])
        close(extra["attn"][0], expected_extra["attn"][0][:, -1:])
        own = model.decoder.get_incremental_state(state, STATE)
        check_state(own, reference, tokens, seen)
