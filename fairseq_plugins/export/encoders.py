"""The encoders of all families as operators.

B sentences, padded on the right to S words, N = B·S; f embedding width, d model width, h heads of width v, C width of a
layer of convolutions, w kernel width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fairseq_plugins.export.program import Program, Weights
from fairseq_plugins.models.conv_encoder.convolutional import ConvolutionalEncoder
from fairseq_plugins.models.conv_encoder.lstm import LSTMEncoder
from fairseq_plugins.models.conv_encoder.pooling import PoolingEncoder
from fairseq_plugins.models.convs2s.encoder import ConvS2SEncoder
from fairseq_plugins.models.source_encoder import SourceEncoder
from fairseq_plugins.models.weighted_transformer.encoder import WeightedTransformerEncoder
from fairseq_plugins.nn.branched_block import BranchedBlock
from fairseq_plugins.nn.embedding import InputEmbedding
from fairseq_plugins.nn.gated_convolution import SQRT_HALF, Shortcut

__all__ = ["SourceProgram", "branched_block", "embed", "encode"]


class SourceProgram(Program):
    """The program that reads the source, up to what steps need of it.

    Args:
        weights: as of `Program`.
        pad: the padding symbol.
        eos: the end of a sentence.
    """

    def __init__(self, weights: Weights, pad: int, eos: int) -> None:
        super().__init__(weights)
        self.words = self.input("words", np.int64, ["B", "S"])
        is_token = self.Not(self.Equal(self.words, pad))  # (B, S)
        self.shape = self.Shape(self.words)
        self.sentences, self.length = self.Split(self.shape, outputs=2, num_outputs=2)
        self.mask = self.Unsqueeze(self.Cast(is_token, to=1), [2])  # (B, S, 1)
        self.lengths = self.ReduceSum(self.Cast(is_token, to=6), [1], keepdims=0)  # (B,), as LSTMs want it
        self.bias = self._bias(is_token)  # added to scores of attention, (B, 1, S)
        self.only_words = self._bias(self.And(is_token, self.Not(self.Equal(self.words, eos))))

    def _bias(self, seen: str) -> str:
        return self.Unsqueeze(self.Where(seen, np.float32(0), np.float32(-np.inf)), [1])

    def flat(self, x: str, width: int) -> str:
        """(B, S, width) -> (N, width)."""
        return self.Reshape(x, [-1, width])

    def by_sentence(self, x: str, *sizes: int) -> str:
        """(N, ...) -> (B, S, ...)."""
        return self.Reshape(x, self.Concat(self.shape, list(sizes), axis=0))

    def heads(self, x: str, heads: int, width: int, *, columns: bool = False) -> str:
        """(N, h·v) -> (B, h, S, v), or (B, h, v, S) as columns."""
        return self.Transpose(self.by_sentence(x, heads, width), perm=[0, 2, 3, 1] if columns else [0, 2, 1, 3])


def embed(program: Program, embedding: InputEmbedding, words: str, first: Any, end: Any) -> str:
    """Words, and the positions from the first to the end: (..., f)."""
    x = program.rows(embedding.words.weight, words)
    if embedding.scale != 1:
        x = program.Mul(x, np.float32(embedding.scale))
    if embedding.positional:
        table = embedding._rows()[embedding.padding_idx + 1 :]
        x = program.Add(x, program.Slice(table, first, end, [0]))
    return x


def encode(program: SourceProgram, encoder: SourceEncoder) -> tuple[str, str]:
    """What `SourceEncoder.encode` gives: keys and values, (B, S, f)."""
    e = embed(program, encoder.embedding, program.words, [0], program.length)
    return _ENCODERS[type(encoder)](program, encoder, e)


def _convs2s(program: SourceProgram, encoder: ConvS2SEncoder, e: str) -> tuple[str, str]:
    width = encoder.embedding.words.embedding_dim
    z = program.linear(program.flat(e, width), encoder.from_embedding.weight, encoder.from_embedding.bias)
    outputs = [z]
    layers: Any = zip(encoder.convolutions, encoder.shortcuts, strict=True)
    for convolution, shortcut_ in layers:
        windows = _windows(program, z, convolution.weight.size(1), convolution.padding)
        z = program.glu(program.linear(windows, convolution.matrix, convolution.bias))
        z = shortcut(program, shortcut_, z, outputs)
        outputs.append(z)
    z = program.linear(z, encoder.to_embedding.weight, encoder.to_embedding.bias)
    z = program.by_sentence(z, width)
    return z, program.Mul(program.Add(z, e), np.float32(SQRT_HALF))


def shortcut(program: Program, module: Shortcut, x: str, outputs: list[str]) -> str:
    """`Shortcut.forward`."""
    if module.distance == 0:
        return x
    residual = outputs[-module.distance]
    if module.projection is not None:
        residual = program.linear(residual, module.projection.weight, module.projection.bias)
    return program.Mul(program.Add(x, residual), np.float32(SQRT_HALF))


def _windows(program: SourceProgram, x: str, width: int, padding: tuple[int, int]) -> str:
    """Each input beside its neighbours, zeros outside the sentence: (N, C) -> (N, w·C)."""
    x = program.Mul(program.by_sentence(x, width), program.mask)
    if sum(padding):
        before, after = padding
        x = program.Pad(x, [0, before, 0, 0, after, 0])
        shifted = [
            program.Slice(x, [start], program.Add(program.length, [start]), [1]) for start in range(1 + sum(padding))
        ]
        x = program.Concat(*shifted, axis=2)
    return program.flat(x, width * (1 + sum(padding)))


def _convolutional(program: SourceProgram, encoder: ConvolutionalEncoder, e: str) -> tuple[str, str]:
    width = encoder.embedding.words.embedding_dim

    def stack(module: Any) -> str:
        x = program.flat(e, width)
        if not isinstance(module.from_embedding, nn.Identity):
            x = program.linear(x, module.from_embedding.weight, module.from_embedding.bias)
        outputs = [x]
        layers: Any = zip(module.convolutions, module.shortcuts, module.residuals, strict=True)
        for convolution, widening, residual in layers:
            windows = _windows(program, x, convolution.weight.size(1), convolution.padding)
            matrix = convolution.weight.transpose(1, 2).flatten(1) * convolution.scale  # (O, w·C)
            x = program.linear(windows, matrix, convolution.bias * convolution.scale)
            if residual:
                start = outputs[-residual]
                if not isinstance(widening, nn.Identity):
                    start = program.linear(start, widening.weight.squeeze(2), widening.bias)
                x = program.Add(x, start)
            x = program.Tanh(x)
            outputs.append(x)
        if not isinstance(module.to_embedding, nn.Identity):
            x = program.linear(x, module.to_embedding.weight, module.to_embedding.bias)
        return program.by_sentence(x, width)

    z = stack(encoder.cnn_a)
    return z, z if encoder.cnn_c is None else stack(encoder.cnn_c)


def _pooling(program: SourceProgram, encoder: PoolingEncoder, e: str) -> tuple[str, str]:
    columns = program.Transpose(program.Mul(e, program.mask), perm=[0, 2, 1])
    half = encoder.width // 2
    z = program.AveragePool(columns, kernel_shape=[encoder.width], pads=[half, half], count_include_pad=1)
    return program.Transpose(z, perm=[0, 2, 1]), e


def _lstm(program: SourceProgram, encoder: LSTMEncoder, e: str) -> tuple[str, str]:
    tops = []
    first = program.Transpose(e, perm=[1, 0, 2])  # (S, B, f)
    stacks: Any = encoder.stacks
    for start, stack in enumerate(stacks):
        x = first
        for number, lstm in enumerate(stack):
            backwards = len(stacks) == 2 and (start + number) % 2 == 1
            x, *_ = lstm_layer(program, lstm, x, backwards)
        tops.append(program.Transpose(x, perm=[1, 0, 2]))
    hidden = len(tops) * stacks[0][0].hidden_size
    z = program.Concat(*tops, axis=2) if len(tops) > 1 else tops[0]
    z = program.linear(program.flat(z, hidden), encoder.to_embedding.weight, None)
    z = program.by_sentence(z, encoder.to_embedding.out_features)
    return z, z


def lstm_layer(program: SourceProgram, lstm: nn.LSTM, x: str, backwards: bool) -> list[str]:
    """(S, B, width) -> (S, B, H) and the last states, which are not used."""

    def ordered(gates: Tensor) -> Tensor:  # as ONNX wants them: input, output, forget, candidate
        i, f, candidate, o = gates.chunk(4)
        return torch.cat([i, o, f, candidate]).unsqueeze(0)

    weight_input, weight_state, bias_input, bias_state = (ordered(part) for part in lstm.all_weights[0])
    states, *rest = program.LSTM(
        x, weight_input, weight_state, torch.cat([bias_input, bias_state], dim=1), program.lengths, outputs=3,
        hidden_size=lstm.hidden_size, direction="reverse" if backwards else "forward",
    )  # fmt: skip
    return [program.Squeeze(states, [1]), *rest]


def _weighted_transformer(program: SourceProgram, encoder: WeightedTransformerEncoder, e: str) -> tuple[str, str]:
    dim = encoder.embedding.words.embedding_dim
    x, bias = program.flat(e, dim), program.Unsqueeze(program.bias, [1])
    layers: Any = encoder.layers
    for layer in layers:
        attention = layer.attention
        heads, scale = attention.heads, math.sqrt(attention.heads / dim)
        q = program.linear(x, attention.query.weight * scale, attention.query.bias * scale)
        k, v = program.Split(
            program.linear(x, attention.key_value.weight, attention.key_value.bias), outputs=2, axis=1, num_outputs=2
        )
        q, v = (program.heads(part, heads, dim // heads) for part in (q, v))
        k = program.heads(k, heads, dim // heads, columns=True)
        a = program.Softmax(program.Add(program.MatMul(q, k), bias), axis=-1)
        by_head = program.Reshape(program.Transpose(program.MatMul(a, v), perm=[1, 0, 2, 3]), [heads, -1, dim // heads])
        x = branched_block(program, layer.branches, x, by_head)
    x = program.by_sentence(x, dim)
    return x, x


def branched_block(program: Program, block: BranchedBlock, x: str, heads: str) -> str:
    """`BranchedBlock.forward`, through folded weights.

    Args:
        program: to add to.
        block: which.
        x: what the layer started from, (N, d).
        heads: (M, N, v).
    """
    folded, M, dim = block.fold(), block.branches, block.out.in_features
    together = program.Reshape(program.Transpose(heads, perm=[1, 0, 2]), [-1, dim])
    u = program.normalise(program.Add(x, program.linear(together, folded.out, block.out.bias)), block.attention_norm)
    own = program.Transpose(program.MatMul(heads, folded.first), perm=[1, 0, 2])  # (N, M, F)
    inner_dim = block.first.out_features
    inner = program.linear(x, block.first.weight, block.first.bias)
    inner = program.Relu(program.Add(inner, program.Reshape(own, [-1, inner_dim])))
    if block.gate is not None:
        gate: Any = block.gate
        scores = program.Gemm(x, gate.projection.weight, transB=1)
        kept, places = program.TopK(scores, [gate.topk], outputs=2)
        weights = program.Mul(program.Softmax(kept, axis=1), np.float32(gate.topk))
        weights = program.ScatterElements(program.Mul(scores, np.float32(0)), places, weights, axis=1)
        inner = program.Mul(program.Reshape(inner, [-1, M, inner_dim // M]), program.Unsqueeze(weights, [2]))
        inner = program.Reshape(inner, [-1, inner_dim])
    return program.normalise(program.Add(u, program.linear(inner, folded.second, block.second.bias)), block.norm)


_ENCODERS: dict[type, Callable[..., tuple[str, str]]] = {
    ConvS2SEncoder: _convs2s,
    ConvolutionalEncoder: _convolutional,
    PoolingEncoder: _pooling,
    LSTMEncoder: _lstm,
    WeightedTransformerEncoder: _weighted_transformer,
}
