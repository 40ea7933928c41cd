"""Exported programs and their search, compared with `translation_fast` and the same model."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_MODEL_NAME_REGISTRY

from fairseq_plugins.common.onnx_program import Weights
from fairseq_plugins.export import translate
from fairseq_plugins.vocabulary.candidates import Candidates
from tests.conftest import WORDS
from tests.export.exporting import assert_same, export, lines_of, search
from tests.search.test_precision import faster

LENGTHS = [9, 6, 3, 1, 5, 5, 12, 1]
BILSTM = {"encoder_hidden_size": 24, "encoder_lstm_layers": 3}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "convs2s": ("convs2s_tiny", {}),
    "attention in some layers, kernels, widths and longer shortcuts": (
        "convs2s_tiny",
        {
            "encoder_layers": "[(32, 4), (48, 1, 2), (32, 3, 0)]",
            "decoder_layers": "[(32, 3), (48, 1), (32, 2, 2), (40, 4)]",
            "decoder_attention": "[True, False, True, False]",
            "share_input_output_embed": True,
        },
    ),
    "no positions": (
        "convs2s_tiny",
        {"no_encoder_positional_embeddings": True, "no_decoder_positional_embeddings": True},
    ),
    "weighted transformer": ("weighted_transformer_tiny", {}),
    "gate": ("weighted_transformer_tiny", {"branch_gating_topk": 2}),
    "uniform weights": ("weighted_transformer_tiny", {"branch_weights": "uniform"}),
    "learned positions, own embeddings": (
        "weighted_transformer_tiny",
        {"encoder_learned_pos": True, "decoder_learned_pos": True, "share_embeddings": "none"},
    ),
    "convolutional encoder": ("conv_encoder_tiny", {}),
    "single stack": ("conv_encoder_tiny", {"single_stack": True}),
    "widening": (
        "conv_encoder_tiny",
        {"encoder_layers": "[(24, 3), (40, 2, 2)]", "aggregation_layers": "[]", "no_residual": False},
    ),
    "pooling": ("conv_encoder_tiny", {"encoder_type": "pooling", "pooling_width": 3}),
    "lstm": ("conv_encoder_tiny", {"encoder_type": "lstm", **BILSTM}),
    "bilstm": ("conv_encoder_tiny", {"encoder_type": "bilstm", "decoder_layers": 2, **BILSTM}),
}
SEARCHES: dict[str, dict[str, Any]] = {
    "beam 4": {"beam": 4, "max_len_b": 12},
    "greedy": {"beam": 1},
    "more steps than the first memory holds": {"beam": 3, "min_len": 20, "max_len_b": 40},
    "by the source's length": {"beam": 5, "max_len_a": 0.7, "max_len_b": 1},
    "rules": {"beam": 3, "min_len": 3, "lenpen": 0.4, "unkpen": -3.0, "word_penalty": 0.3, "max_len_b": 15},
    "no words": {"beam": 2, "min_len": 0, "max_len_b": 0},
}
WIDE = {"embed_dim": 512, "ffn_embed_dim": 2048}
NAMES = {"beam": "beam_size", "lenpen": "len_penalty", "unkpen": "unk_penalty"}  # the generator's names

with_vnni = pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="a CPU without VNNI")


def check(folder: Path, model: Any, dictionary: Dictionary, options: dict[str, Any], **more: Any) -> None:
    lines = lines_of(LENGTHS, WORDS)
    actual = translate.Translator(folder, threads=1).translate(lines, nbest=options["beam"], **options)
    if options["beam"] == 1:
        actual = [[text] for text in actual]
    expected = search(
        model, dictionary, lines, **{NAMES.get(name, name): value for name, value in options.items()}, **more
    )
    if options["beam"] == 1:
        assert actual == [[dictionary.string(each["tokens"]) for each in found] for found in expected]
    else:
        assert_same(actual, expected, dictionary)


@pytest.mark.parametrize("variant", VARIANTS)
def test_all_models(variant: str, build: Callable[..., Any], dictionary: Dictionary, tmp_path: Path) -> None:
    architecture, options = VARIANTS[variant]
    model = build(architecture, **options)
    folder = export(model, tmp_path / "out", dictionary)
    check(folder, model, dictionary, SEARCHES["beam 4"])


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_a_derived_part_is_refused(part, build, architecture, dictionary, tmp_path) -> None:
    """A derived part may compute something else than the program of its base class."""
    model = build(architecture)
    module = getattr(model, part)
    module.__class__ = type("Derived", (type(module),), {})
    with pytest.raises(ValueError, match=r"^Derived "):
        export(model, tmp_path / "out", dictionary)


@pytest.mark.parametrize("options", SEARCHES.values(), ids=SEARCHES)
def test_all_searches(options, build, architecture, dictionary, tmp_path) -> None:
    model = build(architecture, seed=2)
    check(export(model, tmp_path / "out", dictionary), model, dictionary, options)


@pytest.mark.parametrize("int8", [False, True])
def test_blocks_of_words(int8, build, architecture, dictionary, tmp_path, monkeypatch) -> None:
    """A program that scores the vocabulary in three blocks, of which the last is shorter than the beam's candidates,
    finds the same translations, and shares the embeddings' place in the weight file."""
    model, lines, found = build(architecture), lines_of(LENGTHS, WORDS), []
    for size in (len(dictionary), len(dictionary) // 2 - 1):
        monkeypatch.setattr(Weights, "block", size)
        folder = export(model, tmp_path / str(size), dictionary, int8=int8)
        found.append(translate.Translator(folder, threads=1).translate(lines, beam=4, nbest=4, max_len_b=12))
    for one, other in zip(*found, strict=True):
        assert [text for text, _ in one] == [text for text, _ in other]
        assert [score for _, score in one] == pytest.approx([score for _, score in other], abs=1e-5)
    if model.decoder.output_projection.weight is model.decoder.embedding.words.weight and not int8:
        assert len({path.stat().st_size for path in tmp_path.glob("*/weights.bin")}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "preset",
    sorted(
        name
        for name, family in ARCH_MODEL_NAME_REGISTRY.items()
        if family in ("convs2s", "weighted_transformer", "conv_encoder") and "_" in name.removeprefix(family)
    ),
)
def test_all_presets(preset: str, build: Callable[..., Any], dictionary: Dictionary, tmp_path: Path) -> None:
    model = build(preset, enlivened=not preset.startswith("convs2s"))  # deep models amplify rounding
    check(export(model, tmp_path / "out", dictionary), model, dictionary, SEARCHES["beam 4"])


@pytest.mark.parametrize("int8", [False, True])
def test_candidates(build, architecture, int8, dictionary, tmp_path) -> None:
    """The search equals that of `translation_fast` with the same candidates; in int8 it finds only candidates."""
    model = build(architecture)
    always = torch.zeros(len(dictionary), dtype=torch.bool)
    always[[*range(dictionary.nspecial), *range(10, 22)]] = True
    candidates = Candidates(torch.arange(len(dictionary)).remainder(9).add(4).unsqueeze(1), always)
    folder = export(model, tmp_path / "out", dictionary, candidates=candidates, int8=int8)
    if not int8:
        check(folder, model, dictionary, SEARCHES["beam 4"], candidates=candidates)
        return
    source = lines_of([5], WORDS)
    (found,) = translate.Translator(folder, 1).translate(source, max_len_b=20)
    tokens = dictionary.encode_line(source[0], add_if_not_exist=False)
    allowed = {dictionary[word] for word in candidates.mask(tokens.unsqueeze(0).long()).nonzero().flatten().tolist()}
    assert set(found.split()) <= allowed


def test_positions_are_those_of_the_model_and_of_the_task(build, dictionary, tmp_path) -> None:
    """The smaller limit, of the model or of the task, applies."""
    for longest, expected in ((20, 20), (1000, 64)):
        folder = export(build("convs2s_tiny"), tmp_path / str(longest), dictionary, longest_source=longest)
        assert json.loads((folder / "config.json").read_text())["source_positions"] == expected


@pytest.mark.parametrize("words", [5, 6, 7, 9, 10, 11])
def test_the_fewest_candidates_for_a_beam(words, build, dictionary, tmp_path) -> None:
    """A beam of 4 needs 5 words; with at least 11 words, a step returns the best 2k + 3."""
    always = torch.arange(len(dictionary)) < words
    candidates = Candidates(torch.zeros(len(dictionary), 1, dtype=torch.int64), always)
    model = build("weighted_transformer_tiny")
    folder = export(model, tmp_path / "out", dictionary, candidates=candidates)
    check(folder, model, dictionary, SEARCHES["beam 4"], candidates=candidates)


def test_int8_is_near(build: Callable[..., Any], architecture: str, dictionary: Dictionary, tmp_path: Path) -> None:
    """Compare scores of words that both searches find; int8 weights have a quarter of float32's size."""
    model = build(architecture)
    exact, rounded = (export(model, tmp_path / name, dictionary, int8=name == "int8") for name in ("float32", "int8"))
    lines = lines_of(LENGTHS, WORDS)
    scores = [
        [score for ((_, score), *_) in translate.Translator(folder, 1).translate(lines, nbest=2, max_len_b=12)]
        for folder in (exact, rounded)
    ]
    torch.testing.assert_close(torch.tensor(scores[0]), torch.tensor(scores[1]), rtol=0.2, atol=0.2)
    sizes = [(folder / "weights.bin").stat().st_size for folder in (exact, rounded)]
    assert sizes[1] < 0.5 * sizes[0]


@torch.no_grad()
def test_sums_of_int8_do_not_overflow(
    build: Callable[..., Any], dictionary: Dictionary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums beyond 16 bits are exact with VNNI, and also with the unsigned weights that other CPUs need.

    All inputs of an output are large, and all its weights are equal.  Layers have equal matrices, which are
    stored separately nevertheless.
    """
    model = build("weighted_transformer_tiny", branch_weights="uniform")
    numbers = torch.randn_like(model.encoder.layers[0].branches.second.weight[:, :1]) / 64
    for layer in (*model.encoder.layers, *model.decoder.layers):
        block = layer.branches
        block.first.weight.mul_(0.01)
        block.first.bias.fill_(1)
        block.second.weight.copy_(numbers.expand_as(block.second.weight))
    folders = [export(model, tmp_path / name, dictionary, int8=name == "int8") for name in ("float32", "int8")]
    scores = []
    for folder, hidden in ((folders[0], "0"), (folders[1], "0"), (folders[1], "1")):
        monkeypatch.setenv("TRANSLATE_WITHOUT_VNNI", hidden)
        translator = translate.Translator(folder, 1)
        options = translator.step.session.get_session_options()
        unsigned = hidden == "1" or translate.sums_overflow()
        with nullcontext() if unsigned else pytest.raises(RuntimeError, match="x64quantprecision"):  # it is not set
            assert options.get_session_config_entry("session.x64quantprecision") == "1"
        found = translator.translate(lines_of(LENGTHS, WORDS), beam=2, nbest=2, max_len_b=1)
        scores.append(torch.tensor([score for ((_, score), *_) in found]))  # score of the best word
    torch.testing.assert_close(scores[1], scores[0], rtol=0, atol=0.05)
    assert torch.equal(scores[1], scores[2])


@with_vnni
def test_no_sum_overflows_with_vnni() -> None:
    assert not translate.sums_overflow()


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64" or not shutil.which("valgrind"), reason="needs valgrind on x86")
def test_sums_overflow_without_vnni() -> None:
    """valgrind emulates a CPU with AVX2, but without AVX-512 and VNNI."""
    code = "from translate import sums_overflow; print(sums_overflow())"
    command = ["valgrind", "--tool=none", "--log-file=/dev/null", sys.executable, "-c", code]
    folder = Path(translate.__file__).parent
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert result.stdout == "True\n"


@with_vnni
def test_int8_is_faster(build: Callable[..., Any], dictionary: Dictionary, tmp_path: Path) -> None:
    """Products in int8 take less CPU time than those in float32; without VNNI they may not."""
    sizes = {f"{side}_{size}": width for side in ("encoder", "decoder") for size, width in WIDE.items()}
    model = build("weighted_transformer_tiny", **sizes)
    lines = lines_of([20] * 40, WORDS)
    translators = [
        translate.Translator(export(model, tmp_path / str(int8), dictionary, int8=int8), 1) for int8 in (False, True)
    ]
    times = {"beam": 4, "min_len": 5, "max_len_b": 5}
    plain, fast = (lambda translator=each: translator.translate(lines, **times) for each in translators)
    assert faster(plain, fast, turns=5) > 1.5


def test_a_table_and_a_product_name_their_shared_weights_separately(build, dictionary, tmp_path) -> None:
    """onnxruntime then keeps only its packed copy of the product's weights in memory; the file has one copy."""
    model = build("weighted_transformer_tiny", share_embeddings="all")
    folder = export(model, tmp_path / "out", dictionary)
    graph = pytest.importorskip("onnx").load(folder / "step.onnx", load_external_data=False).graph
    places = {each.name: [entry.value for entry in each.external_data] for each in graph.initializer}
    users = {
        operator: [n for each in graph.node if each.op_type == operator for n in each.input if places.get(n)]
        for operator in ("Gather", "Gemm")
    }
    tables, products = users["Gather"], users["Gemm"]
    assert not {*tables} & {*products}
    assert next(places[name] for name in tables) in [places[name] for name in products]


def test_replacement_by_the_attended_word(build, architecture, dictionary, tmp_path) -> None:
    """An unknown word is replaced by the most attended source word, or by its entry in the dictionary."""
    model = build(architecture)
    lines = lines_of([7, 4], WORDS)
    translator = translate.Translator(export(model, tmp_path / "out", dictionary), 1)
    options = {"beam": 3, "unkpen": -30.0, "max_len_b": 6}
    translations = {f"w{number}": f"t{number}" for number in range(0, WORDS, 2)}
    found = translator.translate(lines, replace_unk=translations, **options)
    expected = search(model, dictionary, lines, beam_size=3, unk_penalty=-30.0, max_len_b=6)
    for line, text, (best, *_) in zip(lines, found, expected, strict=True):
        words = line.split()
        padding = best["attention"].size(0) - len(words) - 1
        wanted = []
        for place, token in enumerate(best["tokens"][:-1].tolist()):
            copied = words[int(best["attention"][padding:-1, place].argmax())]
            wanted.append(translations.get(copied, copied) if token == dictionary.unk() else dictionary[token])
        assert dictionary.unk() in best["tokens"].tolist()
        assert text.split() == wanted


def test_the_attention(build, architecture, dictionary, tmp_path) -> None:
    """Layers attend to all source words and the end; the sum over layers is fairseq's attention, up to a factor."""
    model = build(architecture)
    lines = [*lines_of([7, 4, 9], WORDS), " "]
    translator = translate.Translator(export(model, tmp_path / "out", dictionary), 1)
    *told, blank = translator.explain(lines, attention=True, beam=3, nbest=3, max_len_b=8)
    expected = search(model, dictionary, lines[:-1], beam_size=3, max_len_b=8)
    assert blank["translations"][0] == {"text": "", "score": 0.0, "words": [], "unknown": []}
    for line, found, wanted in zip(lines, told, expected, strict=False):
        assert found["words"] == line.split()
        for mine, theirs in zip(found["translations"], wanted, strict=True):
            assert mine["words"] == [dictionary[token] for token in theirs["tokens"][:-1]]
            attention = torch.tensor(mine["attention"])
            assert attention.shape[1:] == (len(mine["words"]), len(line.split()) + 1)
            torch.testing.assert_close(attention.sum(dim=2), torch.ones(attention.shape[:2]))
            padding = theirs["attention"].size(0) - len(line.split()) - 1
            reference = theirs["attention"][padding:, :-1].T
            torch.testing.assert_close(attention.mean(dim=0), reference / reference.sum(dim=1, keepdim=True))
