"""Functions that build ConvS2S from ONNX operators.

B sentences of S words, N = B·S; k hypotheses (rows) per sentence, R = B·k; f embedding width, C input width of a layer,
D output width of a layer.
"""

from __future__ import annotations

from typing import Any

import torch

from fairseq_plugins.common.onnx_program import Program, Sizes, SourceProgram, StepProgram
from fairseq_plugins.convs2s.layers import SQRT_HALF, GatedConvolution, Shortcut
from fairseq_plugins.convs2s.model import ConvS2SDecoder, ConvS2SEncoder

# The classes that can be exported.  Their subclasses are refused, because they may compute a different function.
PARTS = (ConvS2SEncoder, ConvS2SDecoder)


def encode(program: SourceProgram, encoder: ConvS2SEncoder, e: str) -> tuple[str, str]:
    """Add `ConvS2SEncoder.encode`: embeddings, (B, S, f) -> keys and values, (B, S, f)."""
    width = encoder.embedding.words.embedding_dim
    z = program.linear(program.flat(e, width), encoder.from_embedding.weight, encoder.from_embedding.bias)
    outputs = [z]
    layers: Any = zip(encoder.convolutions, encoder.shortcuts, strict=True)
    for convolution, shortcut in layers:
        windows = program.windows(z, convolution.weight.size(1), convolution.padding)
        z = program.glu(program.linear(windows, convolution.matrix, convolution.bias))
        z = _shortcut(program, shortcut, z, outputs)
        outputs.append(z)
    z = program.linear(z, encoder.to_embedding.weight, encoder.to_embedding.bias)
    z = program.by_sentence(z, width)
    return z, program.Mul(program.Add(z, e), SQRT_HALF)


def set_up(program: SourceProgram, decoder: ConvS2SDecoder, keys: str, values: str) -> list[tuple[str, Sizes]]:
    """Add the computation of `ProjectedAttention`; return names and sizes of its results, which are inputs of steps.

    In contrast to `ProjectedAttention`, keys include the factor √½, and one tensor contains the score biases of all
    layers.
    """
    embed_dim = decoder.embedding.words.embedding_dim
    z, v = program.flat(keys, embed_dim), program.flat(values, embed_dim)
    attentions = [attention for _, attention, _ in decoder.layers if attention is not None]
    biases = torch.stack([attention.in_projection.bias for attention in attentions]) * SQRT_HALF
    biases_of_scores = program.transposed(program.by_sentence(program.Gemm(z, biases, transB=1), len(attentions)))
    sources: list[tuple[str, Sizes]] = [
        (program.Mul(program.transposed(keys), SQRT_HALF), ["B", embed_dim, "S"]),
        (program.bias, ["B", 1, "S"]),
        (biases_of_scores, ["B", len(attentions), "S"]),
    ]
    mask = program.Squeeze(program.mask, [2])
    sqrt_lengths = program.Unsqueeze(program.Sqrt(program.ReduceSum(mask, [1], keepdims=1)), [2])  # (B, 1, 1)
    for attention in attentions:
        width = attention.in_projection.in_features
        projected = program.linear(z, attention.in_projection.weight.t() * SQRT_HALF)
        averaged = program.linear(v, attention.out_projection.weight * SQRT_HALF)
        averaged = program.Mul(program.by_sentence(averaged, width), sqrt_lengths)
        sources += [
            (program.transposed(program.by_sentence(projected, width)), ["B", width, "S"]),
            (program.Add(averaged, attention.out_projection.bias * SQRT_HALF), ["B", "S", width]),
        ]
    return sources


def step(program: StepProgram, decoder: ConvS2SDecoder, g: str) -> tuple[str, list[str]]:
    """Add one step: embeddings, (R, f) -> features, (R, width), and the attention of each layer, (B, k, S)."""
    h = program.linear(g, decoder.from_embedding.weight, decoder.from_embedding.bias)
    z, bias, biases, *projected = program.sources
    by_sentence = program.by_sentence(g, decoder.embedding.words.embedding_dim)
    gz = program.Add(program.MatMul(by_sentence, z), bias)
    attending, outputs, attentions = 0, [h], []
    for convolution, attention, shortcut in decoder.layers:
        h = program.glu(_convolution(program, convolution, h))
        if attention is not None:
            keys, values = projected[2 * attending : 2 * attending + 2]
            width = attention.in_projection.in_features
            queries = program.by_sentence(h, width)
            offsets = program.Add(gz, program.columns(biases, attending, attending + 1, axis=1))
            a = program.Softmax(program.Add(program.MatMul(queries, keys), offsets), axis=-1)
            c = program.Add(program.MatMul(a, values), program.Mul(queries, SQRT_HALF))
            h = program.Reshape(c, [-1, width])
            attentions.append(a)
            attending += 1
        h = _shortcut(program, shortcut, h, outputs)
        outputs.append(h)
    features = program.linear(h, decoder.to_embedding.weight, decoder.to_embedding.bias)
    return features, attentions


def _shortcut(program: Program, module: Shortcut, x: str, outputs: list[str]) -> str:
    """Add `Shortcut.forward`."""
    if module.distance == 0:
        return x
    residual = outputs[-module.distance]
    if module.projection is not None:
        residual = program.linear(residual, module.projection.weight, module.projection.bias)
    return program.Mul(program.Add(x, residual), SQRT_HALF)


def _convolution(program: StepProgram, module: GatedConvolution, h: str) -> str:
    """Add a convolution at the current position, without its gate, (R, C) -> (R, 2D)."""
    kernel, dim, _ = module.weight.shape
    if kernel == 1:
        return program.linear(h, module.matrix, module.bias)
    past = program.state((kernel - 1) * dim)
    window = program.Concat(program.reordered(past), h, axis=1)
    program.keep(past, program.columns(window, dim, kernel * dim))
    return program.linear(window, module.matrix, module.bias)
