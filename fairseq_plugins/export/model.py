"""A model as two programs: one that reads the source, and one that makes a step and begins its search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from fairseq_plugins.export.decoders import StepProgram, set_up, step
from fairseq_plugins.export.encoders import SourceProgram, encode
from fairseq_plugins.export.program import Weights
from fairseq_plugins.models.incremental import IncrementalDecoder

__all__ = ["write_programs"]


@torch.no_grad()
def write_programs(model: Any, folder: Path, *, int8: bool, among_candidates: bool) -> dict[str, Any]:
    """Write ``source.onnx``, ``step.onnx`` and their ``weights.bin``.

    Args:
        model: prepared to translate.
        folder: where to.
        int8: whether products are in int8.
        among_candidates: whether a batch has words of its own to predict among.

    Returns:
        what there is to know of them, in names, numbers and lists.
    """
    encoder, decoder = model.encoder, model.decoder
    with (folder / "weights.bin").open("wb") as file:
        weights = Weights(file, "weights.bin", int8)
        source = SourceProgram(weights, encoder.padding_idx, encoder.dictionary.eos())
        sizes = set_up(source, decoder, *encode(source, encoder))
        if among_candidates:
            _select(source, decoder)
        source.write(folder / "source.onnx")

        program = StepProgram(weights, sizes)
        features, attended = step(program, decoder)
        _search(program, decoder, features, among_candidates)
        program.output("attended", attended, np.int64, ["R"])
        program.write(folder / "step.onnx")
    return {
        "inputs": program.inputs(),
        "source_positions": encoder.max_positions(),
        "target_positions": decoder.max_positions(),
    }


def _select(program: SourceProgram, decoder: IncrementalDecoder) -> None:
    """The candidates' part of the output layer, (width, n) and (n,)."""
    layer, words = decoder.output_projection, program.input("candidates", np.int64, ["n"])
    weight = program.rows(layer.weight, words)
    program.output("output", program.Transpose(weight, perm=[1, 0]), np.float32, [layer.in_features, "n"])
    if layer.bias is not None:
        program.output("output_bias", program.Gather(layer.bias, words), np.float32, ["n"])


def _search(program: StepProgram, decoder: IncrementalDecoder, features: str, among_candidates: bool) -> None:
    """The best words of each row and their scores; behind them, each with a rule of its own, unknown words and the end.

    The rules, which are added, are for words, for unknown words and for the end.
    """
    layer, dictionary = decoder.output_projection, decoder.dictionary
    if among_candidates:
        bias = [] if layer.bias is None else [program.input("output_bias", np.float32, ["n"])]
        logits = program.Gemm(features, program.input("output", np.float32, [layer.in_features, "n"]), *bias)
    else:
        shared = layer.weight is decoder.embedding.words.weight
        logits = program.linear(features, layer.weight, layer.bias, shared=shared)
    lprobs = program.LogSoftmax(logits, axis=1)
    best, words = program.TopK(lprobs, program.input("count", np.int64, [1]), outputs=2)
    if among_candidates:
        words = program.Gather(program.input("candidates", np.int64, ["n"]), words)
    ruled = [dictionary.unk(), dictionary.eos()]
    every, own = program.Split(program.input("rules", np.float32, [3]), [1, 2], outputs=2)
    for word in (dictionary.pad(), *ruled):
        best = program.Where(program.Equal(words, word), np.float32(-np.inf), best)
    scores = program.Concat(program.Add(best, every), program.Add(program.Gather(lprobs, ruled, axis=1), own), axis=1)
    rows = program.columns(program.Shape(words), 0, 1)
    more = program.Expand(np.array([ruled]), program.Concat(rows, [2], axis=0))
    program.output("scores", program.Where(program.IsNaN(scores), np.float32(-np.inf), scores), np.float32, ["R", "n"])
    program.output("words", program.Concat(words, more, axis=1), np.int64, ["R", "n"])
