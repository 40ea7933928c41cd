"""Export of a model to a folder with two ONNX programs: one encodes the source, and one makes a decoding step."""

from __future__ import annotations

import hashlib
import importlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from fairseq.data import Dictionary

from fairseq_plugins.common.embedding import InputEmbedding
from fairseq_plugins.common.model import IncrementalDecoder, TranslationModel
from fairseq_plugins.common.onnx_program import Program, Sizes, SourceProgram, StepProgram, Weights
from fairseq_plugins.vocabulary.candidates import Candidates

_README = """A translation model ({family}). It needs Python 3.10 or later and these packages:

    pip install {packages}

Translate line by line, or from Python:

    python translate.py < source.txt > translation.txt
    >>> from translate import Translator; Translator(".").translate(["A sentence."], beam=5, nbest=1)

`python translate.py --help` lists all options. The files are verified against SHA256SUMS at each start.
"""


def write_folder(
    folder: Path,
    model: Any,
    source: Dictionary,
    target: Dictionary,
    *,
    codes: Path | None = None,
    pieces: Path | None = None,
    tokenizer: str | None = None,
    languages: tuple[str, str] | None = None,
    longest_source: int,
    int8: bool = False,
    candidates: Candidates | None = None,
    card: str = "",
) -> None:
    """Write all files of an exported model.

    Args:
        folder: empty folder.
        model: model of this plugin, after `make_generation_fast_`.
        source: source dictionary.
        target: target dictionary.
        codes: file with subword-nmt's codes, if the model uses them.
        pieces: file of the sentencepiece model, if the model uses one.
        tokenizer: ``moses``, or None if input text is already tokenised.
        languages: source and target language, if known.
        longest_source: maximum number of source tokens that the task allows.
        int8: whether to compute products in int8.
        candidates: table of candidate words; None for all words.
        card: text of a model card, which is appended to README.md.
    """
    programs = write_programs(model, folder, int8=int8, with_candidates=candidates is not None)
    for side, dictionary in (("source", source), ("target", target)):
        (folder / f"{side}.txt").write_text("".join(f"{word}\n" for word in dictionary.symbols), encoding="utf-8")
    if codes is not None:
        shutil.copyfile(codes, folder / "codes.txt")
    if pieces is not None:
        shutil.copyfile(pieces, folder / "pieces.model")
    if candidates is not None:
        always = candidates.always.nonzero().flatten().numpy()
        np.savez(folder / "candidates.npz", translations=candidates.translations.numpy(), always=always)
    config = {
        "format": 3,
        **{name: getattr(target, name)() for name in ("bos", "pad", "eos", "unk")},
        "source_words": len(source),
        "target_words": len(target),
        "languages": languages,
        "tokenizer": tokenizer,
        "bpe_separator": None if codes is None else "@@",
        "sentencepiece": pieces is not None,
        "candidates": candidates is not None,
        **programs,
        "source_positions": min(programs["source_positions"], longest_source),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    sums = (f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(folder.iterdir()))
    (folder / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")
    shutil.copyfile(Path(__file__).with_name("translate.py"), folder / "translate.py")
    needed = {"subword-nmt": codes, "sacremoses": tokenizer, "sentencepiece": pieces}
    packages = ["numpy", "onnxruntime", *(name for name, used in needed.items() if used)]
    family = type(model).__name__.removesuffix("Model")
    readme = _README.format(family=family, packages=" ".join(packages)) + (f"\n{card}" if card else "")
    (folder / "README.md").write_text(readme, encoding="utf-8")


@torch.no_grad()
def write_programs(model: Any, folder: Path, *, int8: bool, with_candidates: bool) -> dict[str, Any]:
    """Write ``source.onnx``, ``step.onnx`` and their ``weights.bin``.

    Args:
        model: model of this plugin, after `make_generation_fast_`.
        folder: output folder.
        int8: whether to compute products in int8.
        with_candidates: whether the programs predict only the candidate words of each batch.

    Returns:
        Values for config.json, which are the inputs of ``step.onnx`` and the maximum numbers of source and target
        positions.

    Raises:
        ValueError: the model cannot be exported; see `onnx_program`.
    """
    encoder, decoder, family = model.encoder, model.decoder, onnx_program(model)
    with (folder / "weights.bin").open("wb") as file:
        weights = Weights(file, "weights.bin", int8)
        source = SourceProgram(weights, encoder.padding_idx, encoder.dictionary.eos())
        e = _embed(source, encoder.embedding, source.words, [0], source.length)
        sources = family.set_up(source, decoder, *family.encode(source, encoder, e))
        sizes = _output_sources(source, [*sources, (source.only_words, ["B", 1, "S"])])
        if with_candidates:
            _output_candidates(source, decoder)
        source.write(folder / "source.onnx")

        program = StepProgram(weights, sizes)
        features, attentions = _step(program, decoder, family)
        _output_best_words(program, decoder, features, with_candidates)
        attended = program.ArgMax(program.Add(program.Sum(*attentions), program.only_words), axis=2, keepdims=0)
        program.output("attended", program.Reshape(attended, [-1]), np.int64, ["R"])
        layers = program.Concat(*(program.Unsqueeze(a, [2]) for a in attentions), axis=2)
        program.output("attention", layers, np.float32, ["B", "k", len(attentions), "S"])
        program.write(folder / "step.onnx")
    return {
        "inputs": program.inputs(),
        "source_positions": encoder.max_positions(),
        "target_positions": decoder.max_positions(),
    }


def onnx_program(model: Any) -> ModuleType:
    """Import the module with the ONNX program of a model's family.

    Raises:
        ValueError: the model's class has no attribute ``onnx_program``, or the module that this attribute names does
            not support the model's encoder or decoder.
    """
    name = vars(type(model)).get("onnx_program")
    if not (isinstance(model, TranslationModel) and name):
        raise ValueError(
            f"{type(model).__name__} cannot be exported: its class has no attribute onnx_program; add it, or use "
            "another model"
        )
    program = importlib.import_module(name)
    for part in (model.encoder, model.decoder):
        if type(part) not in program.PARTS:
            names = ", ".join(each.__name__ for each in program.PARTS)
            raise ValueError(f"{type(part).__name__} cannot be exported; use a model with one of {names}")
    return program


def _output_sources(program: SourceProgram, sources: list[tuple[str, Sizes]]) -> list[Sizes]:
    """Add outputs ``source0``, ``source1``, ..., which ``step.onnx`` reads as inputs; return their sizes."""
    for number, (name, sizes) in enumerate(sources):
        program.output(f"source{number}", name, np.float32, sizes)
    return [sizes for _, sizes in sources]


def _step(program: StepProgram, decoder: IncrementalDecoder, family: ModuleType) -> tuple[str, list[str]]:
    """Add one decoding step to the program; return features, (R, width), and attention of each layer, (B, k, S)."""
    after = program.Add(program.position, [1])
    g = _embed(program, decoder.embedding, program.tokens, program.position, after)
    return family.step(program, decoder, g)


def _embed(program: Program, embedding: InputEmbedding, words: str, first: Any, end: Any) -> str:
    """Add the embedding of ``words`` at positions ``first`` to ``end`` - 1 to the program; return it, (..., f)."""
    x = program.rows(embedding.words.weight, words)
    if embedding.scale != 1:
        x = program.Mul(x, embedding.scale)
    if embedding.positional:
        table = embedding.position_rows()[embedding.padding_idx + 1 :]
        x = program.Add(x, program.Slice(table, first, end, [0]))
    return x


def _output_candidates(program: SourceProgram, decoder: IncrementalDecoder) -> None:
    """Add two outputs, the output layer's weight and bias for the n candidate words: (width, n) and (n,)."""
    layer, words = decoder.output_projection, program.input("candidates", np.int64, ["n"])
    weight = program.rows(layer.weight, words)
    program.output("output", program.Transpose(weight, perm=[1, 0]), np.float32, [layer.in_features, "n"])
    if layer.bias is not None:
        program.output("output_bias", program.Gather(layer.bias, words), np.float32, ["n"])


def _output_best_words(program: StepProgram, decoder: IncrementalDecoder, features: str, with_candidates: bool) -> None:
    """Add two outputs, the best words of each row and their scores; the unknown word and the end symbol come last.

    The vocabulary is divided into blocks, so that the memory holds the log-probabilities of only one block at a time.

    The input ``rules`` has three numbers: the first is added to the scores of known words, the second to the score of
    the unknown word, and the third to the score of the end.
    """
    dictionary, count = decoder.dictionary, program.input("count", np.int64, [1])
    ruled = [dictionary.unk(), dictionary.eos()]
    of_ruled, parts = None, []
    for number, logits in enumerate(_blocks_of_logits(program, decoder, features, with_candidates)):
        if of_ruled is None:
            of_ruled = program.Gather(logits, ruled, axis=1)
        length = program.columns(program.Shape(logits), 1, 2)
        lprobs, places = program.TopK(program.LogSoftmax(logits, axis=1), program.Min(count, length), outputs=2)
        best = program.GatherElements(logits, places, axis=1)
        log_sum = program.columns(program.Sub(best, lprobs), 0, 1)  # log Σ exp(logits) of the block, (R, 1)
        parts.append((best, program.Add(places, [number * program.weights.block]), log_sum))
    best, words, log_sums = (program.Concat(*each, axis=1) for each in zip(*parts, strict=True))
    best, places = program.TopK(best, count, outputs=2)
    words = program.GatherElements(words, places, axis=1)
    if with_candidates:
        words = program.Gather(program.input("candidates", np.int64, ["n"]), words)
    every, own = program.Split(program.input("rules", np.float32, [3]), [1, 2], outputs=2)
    for word in (dictionary.pad(), *ruled):
        best = program.Where(program.Equal(words, word), -np.inf, best)
    logits = program.Concat(program.Add(best, every), program.Add(of_ruled, own), axis=1)
    scores = program.Sub(logits, program.ReduceLogSumExp(log_sums, [1]))
    rows = program.columns(program.Shape(words), 0, 1)
    more = program.Expand([ruled], program.Concat(rows, [2], axis=0))
    program.output("scores", program.Where(program.IsNaN(scores), -np.inf, scores), np.float32, ["R", "n"])
    program.output("words", program.Concat(words, more, axis=1), np.int64, ["R", "n"])


def _blocks_of_logits(
    program: StepProgram, decoder: IncrementalDecoder, features: str, with_candidates: bool
) -> Iterator[str]:
    """Add the logits of one block of words after another, (R, words), and yield their names."""
    layer = decoder.output_projection
    if with_candidates:
        candidates = [program.input("output", np.float32, [layer.in_features, "n"])]
        candidates += [] if layer.bias is None else [program.input("output_bias", np.float32, ["n"])]
        yield program.Gemm(features, *candidates)
        return
    shared = layer.weight is decoder.embedding.words.weight
    for start in range(0, len(layer.weight), program.weights.block):
        words = slice(start, start + program.weights.block)
        bias = None if layer.bias is None else layer.bias[words]
        yield program.linear(features, layer.weight[words], bias, shared=shared)
