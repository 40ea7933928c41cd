"""Functions that build the models of Gehring et al. 2016 from ONNX operators.

B sentences of S words, N = B·S, R rows; f embedding width, w kernel width, O output width, H units of an LSTM.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fairseq_plugins.common.model import SourceEncoder
from fairseq_plugins.common.onnx_program import Sizes, SourceProgram, StepProgram
from fairseq_plugins.conv_encoder.decoder import LSTMDecoder
from fairseq_plugins.conv_encoder.model import ConvolutionalEncoder, LSTMEncoder, PoolingEncoder

# The classes that can be exported.  Their subclasses are refused, because they may compute a different function.
PARTS = (ConvolutionalEncoder, PoolingEncoder, LSTMEncoder, LSTMDecoder)


def encode(program: SourceProgram, encoder: SourceEncoder, e: str) -> tuple[str, str]:
    """Add the encoder's method `encode`: embeddings, (B, S, f) -> keys and values, (B, S, f)."""
    forms: dict[type, Any] = {ConvolutionalEncoder: _convolutional, PoolingEncoder: _pooling, LSTMEncoder: _lstm}
    return forms[type(encoder)](program, encoder, e)


def _convolutional(program: SourceProgram, encoder: ConvolutionalEncoder, e: str) -> tuple[str, str]:
    """Add the operators of `ConvolutionalEncoder.encode` to the program; return keys and values."""
    width = encoder.embedding.words.embedding_dim

    def mapped(x: str, module: Any) -> str:
        if isinstance(module, nn.Identity):
            return x
        # The module is a linear map, or a convolution with kernel 1.
        return program.linear(x, module.weight.flatten(1), module.bias)

    def stack(module: Any) -> str:
        x = mapped(program.flat(e, width), module.from_embedding)
        outputs = [x]
        layers: Any = zip(module.convolutions, module.shortcuts, module.residuals, strict=True)
        for convolution, widening, residual in layers:
            windows = program.windows(x, convolution.weight.size(1), convolution.padding)
            matrix = convolution.weight.transpose(1, 2).flatten(1) * convolution.scale  # (O, w·C)
            x = program.linear(windows, matrix, convolution.bias * convolution.scale)
            if residual:
                x = program.Add(x, mapped(outputs[-residual], widening))
            x = program.Tanh(x)
            outputs.append(x)
        return program.by_sentence(mapped(x, module.to_embedding), width)

    z = stack(encoder.cnn_a)
    return z, z if encoder.cnn_c is None else stack(encoder.cnn_c)


def _pooling(program: SourceProgram, encoder: PoolingEncoder, e: str) -> tuple[str, str]:
    """Add the operators of `PoolingEncoder.encode` to the program; return keys and values."""
    columns = program.transposed(program.Mul(e, program.mask))
    half = encoder.width // 2
    z = program.AveragePool(columns, kernel_shape=[encoder.width], pads=[half, half], count_include_pad=1)
    return program.transposed(z), e


def _lstm(program: SourceProgram, encoder: LSTMEncoder, e: str) -> tuple[str, str]:
    """Add the operators of `LSTMEncoder.encode` to the program; return keys and values."""
    tops = []
    first = program.Transpose(e, perm=[1, 0, 2])  # (S, B, f)
    stacks: Any = encoder.stacks
    for start, stack in enumerate(stacks):
        x = first
        for number, layer in enumerate(stack):
            backwards = len(stacks) == 2 and (start + number) % 2 == 1
            x = _lstm_layer(program, layer, x, backwards)
        tops.append(program.Transpose(x, perm=[1, 0, 2]))
    hidden = len(tops) * stacks[0][0].hidden_size
    z = program.Concat(*tops, axis=2) if len(tops) > 1 else tops[0]
    z = program.linear(program.flat(z, hidden), encoder.to_embedding.weight)
    z = program.by_sentence(z, encoder.to_embedding.out_features)
    return z, z


def _lstm_layer(program: SourceProgram, lstm: nn.LSTM, x: str, backwards: bool) -> str:
    """Add an LSTM, (S, B, width) -> (S, B, H)."""

    def ordered(gates: Tensor) -> Tensor:  # ONNX's order of gates: input, output, forget, candidate
        i, f, candidate, o = gates.chunk(4)
        return torch.cat([i, o, f, candidate]).unsqueeze(0)

    weight_input, weight_state, bias_input, bias_state = (ordered(part) for part in lstm.all_weights[0])
    biases, direction = torch.cat([bias_input, bias_state], dim=1), "reverse" if backwards else "forward"
    lengths, hidden = program.lengths, lstm.hidden_size
    states = program.LSTM(x, weight_input, weight_state, biases, lengths, hidden_size=hidden, direction=direction)
    return program.Squeeze(states, [1])


def set_up(program: SourceProgram, decoder: LSTMDecoder, keys: str, values: str) -> list[tuple[str, Sizes]]:
    """Add the computation of `ConditionalInput`; return names and sizes of its results, which are inputs of steps."""
    attentive = decoder.attentive
    f, hidden = attentive.query.out_features, attentive.query.in_features
    z, v = program.flat(keys, f), program.flat(values, f)
    projected = program.by_sentence(program.linear(z, attentive.query.weight.t()), hidden)
    bias = program.by_sentence(program.Gemm(z, attentive.query.bias.unsqueeze(0), transB=1), 1)
    conditional = program.by_sentence(program.linear(v, attentive.conditional_input.weight), 4 * hidden)
    return [
        (program.transposed(program.Concat(keys, projected, axis=2)), ["B", f + hidden, "S"]),
        (program.Add(program.bias, program.transposed(bias)), ["B", 1, "S"]),
        (conditional, ["B", "S", 4 * hidden]),
    ]


def step(program: StepProgram, decoder: LSTMDecoder, g: str) -> tuple[str, list[str]]:
    """Add one step: embeddings, (R, f) -> features, (R, f), and attention, (B, k, S)."""
    attentive = decoder.attentive
    f, hidden = attentive.query.out_features, attentive.query.in_features
    keys, bias, values = program.sources

    def cell(x: str, weights: tuple[Tensor, Tensor], bias: Tensor, more: Any) -> str:
        states = [program.state(hidden) for _ in range(2)]
        h, c = map(program.reordered, states)
        joined = program.Concat(x, h, axis=1)
        gates = program.linear(joined, torch.cat(weights, dim=1), bias)
        if more is not None:
            gates = program.Add(gates, more(joined))
        i, f, candidate, o = program.chunks(gates, 4, axis=1)
        i, f, o = map(program.Sigmoid, (i, f, o))
        c = program.Add(program.Mul(f, c), program.Mul(i, program.Tanh(candidate)))
        h = program.Mul(o, program.Tanh(c))
        for state, after in zip(states, (h, c), strict=True):
            program.keep(state, after)
        return h

    attention = []

    def attend(joined: str) -> str:
        scores = program.MatMul(program.by_sentence(joined, f + hidden), keys)
        attention.append(program.Softmax(program.Add(scores, bias), axis=-1))
        return program.Reshape(program.MatMul(attention[0], values), [-1, 4 * hidden])

    h = cell(g, (attentive.input.weight, attentive.recurrent.weight), attentive.input.bias, attend)
    upper: Any = decoder.upper
    for lstm in upper:
        weight_input, weight_state, *biases = lstm.all_weights[0]
        h = cell(h, (weight_input, weight_state), biases[0] + biases[1], None)
    features = program.linear(h, decoder.to_embedding.weight, decoder.to_embedding.bias)
    return features, attention
