"""The decoding steps of all families as operators, and what they need of the source.

B sentences, k hypotheses (rows) for each, R = B·k; S source positions, N = B·S; f embedding width, d model width, h
heads of width v, C width of a layer of convolutions, H units of an LSTM, P places of earlier keys.

What a step is given of the source has one entry for each sentence and never changes.  Rows of a state are re-ordered at
the start of the step; keys and values of earlier steps never move, and the caller says by a bias which a row looks at.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairseq_plugins.backends.cpu.winograd import NARROWEST_PACKED, sums_of_weights
from fairseq_plugins.export.encoders import SourceProgram, branched_block, embed, shortcut
from fairseq_plugins.export.program import Program, Weights
from fairseq_plugins.models.conv_encoder.decoder import LSTMDecoder
from fairseq_plugins.models.convs2s.decoder import ConvS2SDecoder
from fairseq_plugins.models.incremental import IncrementalDecoder
from fairseq_plugins.models.weighted_transformer.decoder import WeightedTransformerDecoder
from fairseq_plugins.nn.gated_convolution import SQRT_HALF, GatedConvolution

__all__ = ["StepProgram", "set_up", "step"]

Sizes = list["str | int"]


class StepProgram(Program):
    """The program of a decoding step.

    Args:
        weights: as of `Program`.
        sources: sizes of what it is given of the source, last of what is added to attention for it to be to words.

    Attributes:
        states: widths of those that are re-ordered.
        past: heads and width of keys and values, for each layer that attends to earlier steps.
    """

    def __init__(self, weights: Weights, sources: list[Sizes]) -> None:
        super().__init__(weights)
        self.tokens = self.input("tokens", np.int64, ["R"])
        self.position = self.input("position", np.int64, [1])
        given = [self.input(f"source{n}", np.float32, sizes) for n, sizes in enumerate(sources)]
        *self.sources, self.only_words = given
        self.sentences, _ = self.Split(self.Shape(self.sources[0]), [1, len(sources[0]) - 1], outputs=2)
        self.states: list[int] = []
        self.past: list[tuple[int, int]] = []
        self._order = ""
        self._past_bias = ""

    def state(self, width: int) -> str:
        """Another state, (before, width), in the order of the step before, to be `reordered`."""
        if not self.states:
            self._order = self.input("order", np.int64, ["R"])
        self.states.append(width)
        return self.input(f"state{len(self.states) - 1}", np.float32, ["before", width])

    def reordered(self, state: str) -> str:
        """(before, width) -> (R, width)."""
        return self.Gather(state, self._order, axis=0)

    def keep(self, number: int, state: str) -> None:
        """What a state is after the step, (R, width)."""
        self.output(f"next{number}", state, np.float32, ["R", self.states[number]])

    def attend_to_past(self, q: str, keys_values: str, heads: int, width: int) -> str:
        """Attend to the keys and values of earlier steps and of this one, (R, 2·h·v): (B, h, k, v) -> (B, h, k, v)."""
        if not self.past:
            self._past_bias = self.input("past", np.float32, ["B", 1, "k", "P"])
        n = len(self.past)
        self.past.append((heads, width))
        past_keys = self.input(f"keys{n}", np.float32, ["B", heads, width, "P"])
        past_values = self.input(f"values{n}", np.float32, ["B", heads, "P", width])
        self.output(f"new{n}", keys_values, np.float32, ["R", 2 * heads * width])
        parts = self.Split(keys_values, outputs=2, axis=1, num_outputs=2)
        key, value = (self.heads(part, heads, width) for part in parts)
        own = self.ReduceSum(self.Mul(q, key), [3], keepdims=1)
        scores = self.Concat(self.Add(self.MatMul(q, past_keys), self._past_bias), own, axis=3)
        a = self.Softmax(scores, axis=3)
        old = self.MatMul(self.columns(a, 0, -1), past_values)
        return self.Add(old, self.Mul(self.columns(a, -1, np.iinfo(np.int64).max), value))

    def by_sentence(self, x: str, *sizes: int) -> str:
        """(R, ...) -> (B, k, ...)."""
        return self.Reshape(x, self.Concat(self.sentences, [-1, *sizes], axis=0))

    def heads(self, x: str, heads: int, width: int) -> str:
        """(R, h·v) -> (B, h, k, v)."""
        return self.Transpose(self.by_sentence(x, heads, width), perm=[0, 2, 1, 3])


def set_up(program: SourceProgram, decoder: IncrementalDecoder, keys: str, values: str) -> list[Sizes]:
    """Give what steps need of the source, ``source0`` and so on; the sizes of each."""
    sources = _SET_UP[type(decoder)](program, decoder, keys, values)
    sources.append((program.only_words, ["B", 1, "S"]))
    for number, (name, sizes) in enumerate(sources):
        program.output(f"source{number}", name, np.float32, sizes)
    return [sizes for _, sizes in sources]


def step(program: StepProgram, decoder: IncrementalDecoder) -> tuple[str, str]:
    """`StepwiseDecoding.step`: features, (R, width), and the source word that each row attends to most, (R,)."""
    after = program.Add(program.position, [1])
    g = embed(program, decoder.embedding, program.tokens, program.position, after)
    features, attention = _STEPS[type(decoder)](program, decoder, g)
    attended = program.ArgMax(program.Add(attention, program.only_words), axis=2, keepdims=0)
    return features, program.Reshape(attended, [-1])


def _columns(program: Program, x: str) -> str:
    return program.Transpose(x, perm=[0, 2, 1])


def _set_up_convs2s(program: SourceProgram, decoder: ConvS2SDecoder, keys: str, values: str) -> list[tuple[str, Sizes]]:
    """As `ProjectedAttention`; √½ is in the keys, and the biases of all layers are one."""
    embed_dim = decoder.embedding.words.embedding_dim
    z, v = program.flat(keys, embed_dim), program.flat(values, embed_dim)
    attentions = [attention for _, attention, _ in decoder.layers if attention is not None]
    factor = np.float32(SQRT_HALF)
    biases = torch.stack([attention.in_projection.bias for attention in attentions]) * SQRT_HALF
    biases_of_scores = _columns(program, program.by_sentence(program.Gemm(z, biases, transB=1), len(attentions)))
    sources: list[tuple[str, Sizes]] = [
        (program.Mul(_columns(program, keys), factor), ["B", embed_dim, "S"]),
        (program.bias, ["B", 1, "S"]),
        (biases_of_scores, ["B", len(attentions), "S"]),
    ]
    mask = program.Squeeze(program.mask, [2])
    sqrt_lengths = program.Unsqueeze(program.Sqrt(program.ReduceSum(mask, [1], keepdims=1)), [2])  # (B, 1, 1)
    for attention in attentions:
        width = attention.in_projection.in_features
        projected = program.linear(z, attention.in_projection.weight.t() * SQRT_HALF, None)
        averaged = program.linear(v, attention.out_projection.weight * SQRT_HALF, None)
        averaged = program.Mul(program.by_sentence(averaged, width), sqrt_lengths)
        sources += [
            (_columns(program, program.by_sentence(projected, width)), ["B", width, "S"]),
            (program.Add(averaged, attention.out_projection.bias * SQRT_HALF), ["B", "S", width]),
        ]
    return sources


def _convs2s(program: StepProgram, decoder: ConvS2SDecoder, g: str) -> tuple[str, str]:
    h = program.linear(g, decoder.from_embedding.weight, decoder.from_embedding.bias)
    z, bias, biases, *projected = program.sources
    by_sentence = program.by_sentence(g, decoder.embedding.words.embedding_dim)
    gz = program.Add(program.MatMul(by_sentence, z), bias)
    attending, outputs, attentions = 0, [h], []
    for convolution, attention, shortcut_ in decoder.layers:
        h = program.glu(_convolution(program, convolution, h))
        if attention is not None:
            keys, values = projected[2 * attending : 2 * attending + 2]
            width = attention.in_projection.in_features
            queries = program.by_sentence(h, width)
            offsets = program.Add(gz, program.columns(biases, attending, attending + 1, axis=1))
            a = program.Softmax(program.Add(program.MatMul(queries, keys), offsets), axis=-1)
            c = program.Add(program.MatMul(a, values), program.Mul(queries, np.float32(SQRT_HALF)))
            h = program.Reshape(c, [-1, width])
            attentions.append(a)
            attending += 1
        h = shortcut(program, shortcut_, h, outputs)
        outputs.append(h)
    features = program.linear(h, decoder.to_embedding.weight, decoder.to_embedding.bias)
    return features, program.Sum(*attentions)


def _convolution(program: StepProgram, module: GatedConvolution, h: str) -> str:
    """The newest position's, (R, C) -> (R, O)."""
    kernel, dim, _ = module.weight.shape
    if kernel == 1:
        return program.linear(h, module.matrix, module.bias)
    if kernel == 3 and dim >= NARROWEST_PACKED and not program.weights.int8:
        return _in_pairs(program, module, h)
    number = len(program.states)
    before = program.reordered(program.state((kernel - 1) * dim))
    window = program.Concat(before, h, axis=1)
    program.keep(number, program.columns(window, dim, kernel * dim))
    return program.linear(window, module.matrix, module.bias)


def _in_pairs(program: StepProgram, module: GatedConvolution, h: str) -> str:
    """The same in four products for two steps (see `winograd`): three in the first, which leaves m_1 - m_2."""
    w0, w1, w2, w3 = sums_of_weights(module.weight.detach()).transpose(1, 2)
    _, dim, width = module.weight.shape
    number = len(program.states)
    before, begun = program.reordered(program.state(2 * dim)), program.state(width)
    older, newer = program.Split(before, outputs=2, axis=1, num_outputs=2)
    program.keep(number, program.Concat(newer, h, axis=1))

    def first() -> list[str]:
        m0 = program.linear(program.Sub(older, h), w0, None)
        m1 = program.linear(program.Add(newer, h), w1, module.bias)
        m2 = program.linear(program.Sub(h, newer), w2, None)
        return [program.Sum(m0, m1, m2), program.Sub(m1, m2)]

    def second() -> list[str]:
        m3 = program.linear(program.Sub(h, older), w3, None)
        return [program.Add(program.reordered(begun), m3), program.columns(begun, 0, 0, axis=0)]

    is_first = program.Equal(program.Mod(program.position, [2]), [0])
    y, left = program.either(is_first, first, second)
    program.keep(number + 1, left)
    return y


def _set_up_lstm(program: SourceProgram, decoder: LSTMDecoder, keys: str, values: str) -> list[tuple[str, Sizes]]:
    """As `ConditionalInput` of the conv_encoder."""
    attentive = decoder.attentive
    f, hidden = attentive.query.out_features, attentive.query.in_features
    z, v = program.flat(keys, f), program.flat(values, f)
    projected = program.by_sentence(program.linear(z, attentive.query.weight.t(), None), hidden)
    bias = program.by_sentence(program.Gemm(z, attentive.query.bias.unsqueeze(0), transB=1), 1)
    conditional = program.by_sentence(program.linear(v, attentive.conditional_input.weight, None), 4 * hidden)
    return [
        (_columns(program, program.Concat(keys, projected, axis=2)), ["B", f + hidden, "S"]),
        (program.Add(program.bias, _columns(program, bias)), ["B", 1, "S"]),
        (conditional, ["B", "S", 4 * hidden]),
    ]


def _lstm(program: StepProgram, decoder: LSTMDecoder, g: str) -> tuple[str, str]:
    attentive = decoder.attentive
    f, hidden = attentive.query.out_features, attentive.query.in_features
    keys, bias, values = program.sources

    def cell(x: str, weights: tuple[Tensor, Tensor], bias: Tensor, more: Any) -> str:
        number = len(program.states)
        h, c = (program.reordered(program.state(hidden)) for _ in range(2))
        joined = program.Concat(x, h, axis=1)
        gates = program.linear(joined, torch.cat(weights, dim=1), bias)
        if more is not None:
            gates = program.Add(gates, more(joined))
        i, f, candidate, o = program.Split(gates, outputs=4, axis=1, num_outputs=4)
        i, f, o = map(program.Sigmoid, (i, f, o))
        c = program.Add(program.Mul(f, c), program.Mul(i, program.Tanh(candidate)))
        h = program.Mul(o, program.Tanh(c))
        program.keep(number, h)
        program.keep(number + 1, c)
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
    return features, attention[0]


def _set_up_weighted_transformer(
    program: SourceProgram, decoder: WeightedTransformerDecoder, keys: str, values: str
) -> list[tuple[str, Sizes]]:
    dim = decoder.embedding.words.embedding_dim
    x = program.flat(keys, dim)
    sources: list[tuple[str, Sizes]] = [(program.Unsqueeze(program.bias, [1]), ["B", 1, 1, "S"])]
    layers: Any = decoder.layers
    for layer in layers:
        other = layer.source_attention
        width = dim // other.heads
        projected = program.linear(x, other.key_value.weight, other.key_value.bias)
        k, v = program.Split(projected, outputs=2, axis=1, num_outputs=2)
        sources += [
            (program.heads(k, other.heads, width, columns=True), ["B", other.heads, width, "S"]),
            (program.heads(v, other.heads, width), ["B", other.heads, "S", width]),
        ]
    return sources


def _weighted_transformer(program: StepProgram, decoder: WeightedTransformerDecoder, x: str) -> tuple[str, str]:
    dim = decoder.embedding.words.embedding_dim
    bias, *sources = program.sources
    layers: Any = decoder.layers
    for number, layer in enumerate(layers):
        own, other, out = layer.self_attention, layer.source_attention, layer.self_attention_out
        heads, width = own.heads, dim // own.heads
        scale = 1 / math.sqrt(width)
        weight = torch.cat([own.query.weight * scale, own.key_value.weight])
        together = program.linear(x, weight, torch.cat([own.query.bias * scale, own.key_value.bias]))
        q, keys_values = program.Split(together, [dim, 2 * dim], outputs=2, axis=1)
        attended = program.attend_to_past(program.heads(q, heads, width), keys_values, heads, width)
        attended = program.Reshape(program.Transpose(attended, perm=[0, 2, 1, 3]), [-1, dim])
        x = program.normalise(program.Add(x, program.linear(attended, out.weight, out.bias)), layer.self_attention_norm)

        keys, values = sources[2 * number : 2 * number + 2]
        q = program.heads(program.linear(x, other.query.weight * scale, other.query.bias * scale), heads, width)
        a = program.Softmax(program.Add(program.MatMul(q, keys), bias), axis=-1)
        by_head = program.Transpose(program.MatMul(a, values), perm=[1, 0, 2, 3])
        x = branched_block(program, layer.branches, x, program.Reshape(by_head, [heads, -1, width]))
    return x, program.ReduceMean(a, [1], keepdims=0)


_SET_UP: dict[type, Any] = {
    ConvS2SDecoder: _set_up_convs2s,
    LSTMDecoder: _set_up_lstm,
    WeightedTransformerDecoder: _set_up_weighted_transformer,
}
_STEPS: dict[type, Any] = {
    ConvS2SDecoder: _convs2s,
    LSTMDecoder: _lstm,
    WeightedTransformerDecoder: _weighted_transformer,
}
