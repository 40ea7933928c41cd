"""Decoding step by step equals decoding all at once: outputs, attention and state."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairseq_plugins.common.source import Source
from tests.common.stepwise import check_stepwise_equals_full, close, decodings


@st.composite
def options(draw: st.DrawFn) -> dict:
    layers = draw(st.integers(1, 3))
    widths, kernels = st.sampled_from([8, 12, 40]), st.integers(1, 5)
    return {
        "encoder_layers": str([(draw(widths), draw(kernels)) for _ in range(2)]),
        "decoder_layers": str([(draw(widths), draw(kernels), draw(st.integers(0, i + 1))) for i in range(layers)]),
        "decoder_attention": str(draw(st.lists(st.booleans(), min_size=layers, max_size=layers).filter(any))),
        "encoder_embed_dim": 12,
        "decoder_embed_dim": 12,
        "no_decoder_positional_embeddings": draw(st.booleans()),
        "no_encoder_positional_embeddings": draw(st.booleans()),
        "share_input_output_embed": draw(st.booleans()),
        "decoder_out_embed_dim": 12,
    }


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(decoding=decodings(options()))
def test_stepwise_equals_full(build, sentences, decoding: dict) -> None:
    check_stepwise_equals_full(build, sentences, "convs2s_tiny", decoding, check_windows)


def check_windows(decoding, reference, tokens: torch.Tensor, source: Source) -> None:
    """The state is the last inputs of each convolution."""
    seen: list[torch.Tensor] = []
    hooks = [
        convolution.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        for convolution in reference.decoder.convolutions
    ]
    reference.decoder(tokens, source)
    for hook in hooks:
        hook.remove()
    for (convolution, _, _), inputs in zip(decoding.layers, seen, strict=True):
        size = convolution.past.size(1) // inputs.size(2)
        past = torch.cat([inputs.new_zeros(size, *inputs.shape[1:]), inputs])[len(inputs) :].transpose(0, 1)
        close(convolution.past, past.flatten(1))
