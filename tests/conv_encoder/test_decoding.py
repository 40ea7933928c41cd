"""Decoding step by step equals decoding all at once: outputs, attention and state."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairseq_plugins.common.source import Source
from tests.common.stepwise import check_stepwise_equals_full, close, decodings


@st.composite
def options(draw: st.DrawFn) -> dict:
    layers = st.lists(st.tuples(st.sampled_from([8, 12]), st.integers(1, 4), st.integers(0, 1)), min_size=1, max_size=3)
    return {
        "encoder_type": draw(st.sampled_from(["convolutional", "pooling", "lstm", "bilstm"])),
        "encoder_layers": str(draw(layers)),
        "aggregation_layers": str(draw(layers)),
        "single_stack": draw(st.booleans()),
        "no_encoder_positional_embeddings": draw(st.booleans()),
        "pooling_width": draw(st.sampled_from([1, 3, 5])),
        "encoder_embed_dim": 12,
        "encoder_hidden_size": 10,
        "encoder_lstm_layers": draw(st.integers(1, 3)),
        "decoder_hidden_size": 16,
        "decoder_layers": draw(st.integers(1, 3)),
    }


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(decoding=decodings(options()))
def test_stepwise_equals_full(build, sentences, decoding: dict) -> None:
    check_stepwise_equals_full(build, sentences, "conv_encoder_tiny", decoding, check_states)


@torch.no_grad()
def test_both_biases_of_an_lstm_count(build, sentences) -> None:
    """Both biases of an LSTM are zero in a new model, but not in a trained one."""
    model = build("conv_encoder_tiny", decoder_layers=3).double()
    for lstm in model.decoder.upper:
        lstm.bias_ih_l0.normal_()
        lstm.bias_hh_l0.normal_()
    encoded, target = model.encoder(sentences([5, 3])), sentences([4, 4])
    expected, _ = model.decoder(target, encoded)
    close(model.decoder(target, encoded, incremental_state={})[0], expected)


def check_states(decoding, reference, tokens: torch.Tensor, source: Source) -> None:
    """The state is the last hidden state of each LSTM."""
    seen: list[torch.Tensor] = []
    lstms = [reference.decoder.attentive, *reference.decoder.upper]
    hooks = [lstm.register_forward_hook(lambda _, __, outputs: seen.append(outputs[0])) for lstm in lstms]
    reference.decoder(tokens, source)
    for hook in hooks:
        hook.remove()
    for lstm, states in zip(decoding.lstms, seen, strict=True):
        close(lstm.h, states[:, -1])
