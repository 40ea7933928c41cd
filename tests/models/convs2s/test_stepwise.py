"""Decoding step by step equals decoding all at once: outputs, attention and state."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairseq_plugins.nn.multi_step_attention import MultiStepAttention, ProjectedAttention
from fairseq_plugins.nn.source import Source

STATE = "decoding"


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 2e-2}[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@st.composite
def decodings(draw: st.DrawFn) -> dict:
    """A model, a padded batch, a beam, and how rows are re-ordered and sentences leave before each step."""
    layers = draw(st.integers(1, 3))
    widths, kernels = st.sampled_from([8, 12, 40]), st.integers(1, 5)
    sentences, beam = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    left, orders = sentences, []
    for _ in range(draw(st.integers(1, 6))):
        stay = sorted(draw(st.sets(st.integers(0, left - 1), min_size=1)))
        orders.append([s * beam + draw(st.integers(0, beam - 1)) for s in stay for _ in range(beam)])
        left = len(stay)
    attention = draw(st.lists(st.booleans(), min_size=layers, max_size=layers).filter(any))
    return {
        "options": {
            "encoder_layers": str([(draw(widths), draw(kernels)) for _ in range(2)]),
            "decoder_layers": str([(draw(widths), draw(kernels), draw(st.integers(0, i + 1))) for i in range(layers)]),
            "decoder_attention": str(attention),
            "encoder_embed_dim": 12,
            "decoder_embed_dim": 12,
            "no_decoder_positional_embeddings": draw(st.booleans()),
            "no_encoder_positional_embeddings": draw(st.booleans()),
            "share_input_output_embed": draw(st.booleans()),
            "decoder_out_embed_dim": 12,
        },
        "lengths": draw(st.lists(st.integers(1, 9), min_size=sentences, max_size=sentences)),
        "left_pad": draw(st.booleans()),
        "beam": beam,
        "orders": orders,
        "prepared": draw(st.booleans()),
        "dtype": draw(st.sampled_from([torch.float32, torch.float64])),
    }


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(decoding=decodings())
@torch.no_grad()
def test_stepwise_equals_full(build, sentences, dictionary, device, decoding: dict) -> None:
    model = build("convs2s_tiny", **decoding["options"]).to(decoding["dtype"])
    reference = build("convs2s_tiny", **decoding["options"]).to(decoding["dtype"])
    if decoding["prepared"]:
        model.make_generation_fast_(need_attn=True)
    beam = decoding["beam"]
    source = sentences(decoding["lengths"], decoding["left_pad"])
    expanded = torch.arange(len(source), device=device).repeat_interleave(beam)
    encoded = model.encoder.reorder_encoder_out(model.encoder(source), expanded)
    everything = reference.encoder(source)  # never re-ordered: its rows are looked up below

    torch.manual_seed(2)
    sentence = expanded
    tokens = torch.randint(dictionary.nspecial, len(dictionary), (len(expanded), 1), device=device)
    state: dict = {}
    for new_order in [None, *decoding["orders"]]:
        if new_order is not None:
            order = torch.tensor(new_order, device=device)
            model.decoder.reorder_incremental_state_scripting(state, order)
            encoded = model.encoder.reorder_encoder_out(encoded, order)
            new = torch.randint(dictionary.nspecial, len(dictionary), (len(order), 1), device=device)
            sentence, tokens = sentence[order], torch.cat([tokens[order], new], dim=1)
        logits, extra = model.decoder(tokens, encoded, incremental_state=state)
        expected, expected_extra = reference.decoder(tokens, everything.select(sentence))
        close(logits, expected[:, -1:])
        close(extra["attn"][0], expected_extra["attn"][0][:, -1:])
        check_windows(model, reference, state, tokens, everything.select(sentence))


def check_windows(model, reference, state: dict, tokens: torch.Tensor, source: Source) -> None:
    """The state is the last inputs of each convolution."""
    seen: list[torch.Tensor] = []
    hooks = [
        convolution.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        for convolution in reference.decoder.convolutions
    ]
    reference.decoder(tokens, source)
    for hook in hooks:
        hook.remove()
    decoding = model.decoder.get_incremental_state(state, STATE)
    for layer, inputs in zip(decoding.layers, seen, strict=True):
        width = layer.window.buffer.size(1)
        past = torch.cat([inputs.new_zeros(width, *inputs.shape[1:]), inputs])[-width:].transpose(0, 1)
        close(layer.window.buffer, past)


@torch.no_grad()
def test_several_tokens_at_once(build, sentences) -> None:
    """fairseq's fconv silently uses only the last of them."""
    model = build("convs2s_tiny")
    encoded, target = model.encoder(sentences([5, 3])), sentences([7, 7])
    expected, _ = model.decoder(target, encoded)
    state: dict = {}
    first, _ = model.decoder(target[:, :3], encoded, incremental_state=state)
    rest, _ = model.decoder(target, encoded, incremental_state=state)
    close(torch.cat([first, rest], dim=1), expected)
    with pytest.raises(ValueError, match="7 tokens of each row have been decoded and 1 are given"):
        model.decoder(target[:, -1:], encoded, incremental_state=state)


@torch.no_grad()
def test_rows_that_are_no_beams(build, sentences, device) -> None:
    """Sentences in another order before decoding: no beams, so each row is a sentence of its own."""
    model = build("convs2s_tiny")
    encoded = model.encoder.reorder_encoder_out(
        model.encoder(sentences([5, 3])), torch.tensor([1, 0, 1], device=device)
    )
    target = sentences([4, 4, 4])
    expected, _ = model.decoder(target, encoded)
    close(model.decoder(target, encoded, incremental_state={})[0], expected)


@torch.no_grad()
def test_weights_never_go_stale(build, sentences) -> None:
    """Whatever changes the weights, and however, the next batch is decoded with what they are then."""
    model, other = build("convs2s_tiny"), build("convs2s_tiny", seed=2)
    encoded, target = model.encoder(sentences([5, 3])), sentences([4, 4])

    def check() -> None:
        expected, _ = model.decoder(target, encoded)
        close(model.decoder(target, encoded, incremental_state={})[0], expected)

    check()
    for parameter in model.parameters():
        parameter.data.mul_(1.1)  # as fairseq's optimizers write: autograd's version counters do not notice
    check()
    model.load_state_dict(other.state_dict())
    check()
    model.make_generation_fast_(need_attn=False)
    check()
    average = {
        name: (value + build("convs2s_tiny").state_dict()[name]) / 2 for name, value in other.state_dict().items()
    }
    model.load_state_dict(average)  # a training checkpoint, into a model prepared for inference
    check()
    for parameter in model.parameters():
        parameter.data.mul_(0.9)
    check()


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
    for actual, expected in zip(ProjectedAttention(attention, source)(h, gz), attention(h, g, source), strict=True):
        close(actual, expected)


def test_a_step_never_waits_for_the_device(build, sentences, device) -> None:
    if device.type != "cuda":
        pytest.skip("needs a GPU: run with --device cuda")
    model = build("convs2s_tiny")
    model.make_generation_fast_(need_attn=True)
    order = torch.arange(2, device=device).repeat_interleave(3)
    with torch.no_grad():
        encoded = model.encoder.reorder_encoder_out(model.encoder(sentences([5, 3])), order)
        target, state = sentences([6] * 6), {}
        new_order = torch.tensor([0, 0, 1, 5, 4, 3], device=device)
        for step in range(1, 7):
            torch.cuda.set_sync_debug_mode("error")
            try:
                model.decoder(target[:, :step], encoded, incremental_state=state)
                model.decoder.reorder_incremental_state_scripting(state, new_order)
            finally:
                torch.cuda.set_sync_debug_mode("default")
