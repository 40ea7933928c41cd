"""Functions that build the Weighted Transformer from ONNX operators.

B sentences of S words, N = B·S; k hypotheses (rows) per sentence, R = B·k; d model width, h heads (M branches) of width
v, F inner width of a branch's feed-forward network.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fairseq_plugins.common.onnx_program import Program, Sizes, SourceProgram, StepProgram
from fairseq_plugins.weighted_transformer.branches import BranchedBlock
from fairseq_plugins.weighted_transformer.model import WeightedTransformerDecoder, WeightedTransformerEncoder

# The classes that can be exported.  Their subclasses are refused, because they may compute a different function.
PARTS = (WeightedTransformerEncoder, WeightedTransformerDecoder)


def encode(program: SourceProgram, encoder: WeightedTransformerEncoder, e: str) -> tuple[str, str]:
    """Add `WeightedTransformerEncoder.encode`: embeddings, (B, S, d) -> keys and values, the same tensor, (B, S, d)."""
    dim = encoder.embedding.words.embedding_dim
    x, bias = program.flat(e, dim), program.Unsqueeze(program.bias, [1])
    layers: Any = encoder.layers
    for layer in layers:
        attention = layer.attention
        heads, scale = attention.heads, math.sqrt(attention.heads / dim)
        q = program.linear(x, attention.query.weight * scale, attention.query.bias * scale)
        k, v = _keys_values(program, attention, x)
        a = program.Softmax(program.Add(program.MatMul(program.heads(q, heads, dim // heads), k), bias), axis=-1)
        x = _branched_block(program, layer.branches, x, program.MatMul(a, v))
    x = program.by_sentence(x, dim)
    return x, x


def set_up(
    program: SourceProgram, decoder: WeightedTransformerDecoder, keys: str, values: str
) -> list[tuple[str, Sizes]]:
    """Add the inputs of a step that depend on the source, and return their names and sizes.

    These inputs are the bias of attention scores, and the keys and values of each layer.
    """
    dim = decoder.embedding.words.embedding_dim
    x = program.flat(keys, dim)
    sources: list[tuple[str, Sizes]] = [(program.Unsqueeze(program.bias, [1]), ["B", 1, 1, "S"])]
    layers: Any = decoder.layers
    for layer in layers:
        heads = layer.source_attention.heads
        k, v = _keys_values(program, layer.source_attention, x)
        sources += [(k, ["B", heads, dim // heads, "S"]), (v, ["B", heads, "S", dim // heads])]
    return sources


def step(program: StepProgram, decoder: WeightedTransformerDecoder, x: str) -> tuple[str, list[str]]:
    """Add one step: embeddings, (R, d) -> features, (R, d), and the attention of the last layer, (B, k, S)."""
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
        x = _branched_block(program, layer.branches, x, program.MatMul(a, values))
    return x, [program.ReduceMean(a, [1], keepdims=0)]


def _keys_values(program: SourceProgram, attention: Any, x: str) -> tuple[str, str]:
    """Add the linear maps that compute keys and values from a source, (N, d).

    Returns:
        Keys as columns, (B, h, v, S), and values, (B, h, S, v).
    """
    heads, dim = attention.heads, attention.key_value.in_features
    k, v = program.chunks(program.linear(x, attention.key_value.weight, attention.key_value.bias), 2, axis=1)
    return program.heads(k, heads, dim // heads, columns=True), program.heads(v, heads, dim // heads)


def _branched_block(program: Program, block: BranchedBlock, x: str, attended: str) -> str:
    """Add `BranchedBlock.forward` with folded weights.

    Args:
        x: input of the layer, (N, d).
        attended: outputs of the attention heads for all tokens, (B, M, tokens, v).
    """
    folded, M, dim = block.fold(), block.branches, block.out.in_features
    heads = program.Reshape(program.Transpose(attended, perm=[1, 0, 2, 3]), [M, -1, dim // M])  # (M, N, v)
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
        weights = program.Mul(program.Softmax(kept, axis=1), float(gate.topk))
        weights = program.ScatterElements(program.Mul(scores, 0.0), places, weights, axis=1)
        inner = program.Mul(program.Reshape(inner, [-1, M, inner_dim // M]), program.Unsqueeze(weights, [2]))
        inner = program.Reshape(inner, [-1, inner_dim])
    return program.normalise(program.Add(u, program.linear(inner, folded.second, block.second.bias)), block.norm)
