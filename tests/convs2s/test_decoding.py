"""Decoding step by step equals decoding all at once: outputs, attention and state."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairseq_plugins.common.source import Source
from fairseq_plugins.convs2s.layers import GatedConvolution, MultiStepAttention, ProjectedAttention
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@torch.no_grad()
def test_projected_attention_equals_attention(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    attention = MultiStepAttention(dim=20, embed_dim=12).to(dtype)
    attention.in_projection.bias.normal_()
    attention.out_projection.bias.normal_()
    padding = torch.arange(7) >= torch.tensor([7, 4, 1]).unsqueeze(1)
    source = Source(torch.randn(3, 7, 12, dtype=dtype), torch.randn(3, 7, 12, dtype=dtype), padding)
    h, g = torch.randn(3, 5, 20, dtype=dtype), torch.randn(3, 5, 12, dtype=dtype)
    gz = torch.baddbmm(source.bias, g, source.keys.transpose(1, 2), alpha=0.5**0.5)
    projected = ProjectedAttention(attention, source, None)
    for actual, expected in zip(projected.attend(h, gz), attention(h, g, source), strict=True):
        close(actual, expected)


def test_convolved_windows_equal_convolved_sentences() -> None:
    torch.manual_seed(1)
    convolution = GatedConvolution(3, 2, kernel=4, causal=True)
    convolution.bias.data.normal_()
    x = torch.randn(6, 5, 3)
    windows = F.pad(x, (0, 0, 0, 0, 3, 0)).unfold(0, 4, 1).transpose(2, 3).flatten(2)
    torch.testing.assert_close(convolution.of_windows(windows), convolution(x))
