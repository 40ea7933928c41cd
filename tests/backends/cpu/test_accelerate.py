"""The processors' room against the plain model: the same losses, gradients and translations, and it can be left out."""

from __future__ import annotations

import ast
import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fairseq.models import BaseFairseqModel
from torch import nn

import fairseq_plugins
from fairseq_plugins.backends.cpu import accelerate_
from fairseq_plugins.backends.cpu.convolution import FastGatedConvolution
from fairseq_plugins.backends.cpu.linear import FastLinear
from fairseq_plugins.backends.cpu.lstm import FastConvolution
from fairseq_plugins.backends.cpu.packing import Packing
from fairseq_plugins.generation.beam_search import FastBeamSearch
from fairseq_plugins.models.conv_encoder.convolutional import Convolution
from fairseq_plugins.models.translation_model import TranslationModel
from fairseq_plugins.nn.gated_convolution import GatedConvolution

# Wide and long enough that each fast form has its turn.
SIZES = {
    "convs2s_tiny": {"encoder_layers": "[(512, 3)] * 2", "decoder_layers": "[(512, 3)] * 2"},
    "weighted_transformer_tiny": {},
    "conv_encoder_tiny": {},
}


@pytest.fixture
def twins(build, architecture: str, monkeypatch: pytest.MonkeyPatch) -> tuple[BaseFairseqModel, BaseFairseqModel]:
    """The same model, plain and fast."""
    fast = build(architecture, **SIZES[architecture])
    monkeypatch.setattr(TranslationModel, "accelerate_", staticmethod(lambda module: None))
    plain = build(architecture, **SIZES[architecture])
    monkeypatch.undo()
    return plain, fast


def kinds(model: nn.Module) -> set[str]:
    return {
        kind.__name__ for part in model.modules() for kind in type(part).__mro__ if kind.__name__.startswith("Fast")
    }


def test_parameters_and_their_names_stay(twins: tuple[BaseFairseqModel, BaseFairseqModel]) -> None:
    plain, fast = twins
    assert not kinds(plain)
    assert "FastLinear" in kinds(fast)
    assert type(fast.decoder.decoding_class.step) is type(plain.decoder.decoding_class.step)
    assert fast.decoder.decoding_class.__mro__[1:].count(plain.decoder.decoding_class) == 1
    states = plain.state_dict(), fast.state_dict()
    assert [*states[0]] == [*states[1]]
    assert all(torch.equal(*pair) for pair in zip(*(state.values() for state in states), strict=True))
    before = copy.deepcopy(fast)
    accelerate_(fast)
    assert kinds(fast) == kinds(before)
    assert fast.decoder.decoding_class is before.decoder.decoding_class


def test_losses_and_gradients(twins: tuple[BaseFairseqModel, BaseFairseqModel], sentences) -> None:
    source, target = sentences([10] * 64), sentences([8] * 64)
    results = []
    for model in twins:
        model.decoder.need_attn = False
        logits, _ = model(source, None, target)
        logits.float().log_softmax(dim=-1).gather(2, target.unsqueeze(2)).sum().backward()
        results.append([logits, *(part.grad for part in model.parameters() if part.grad is not None)])
    for plain, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-3, atol=1e-4 * float(plain.abs().max()))


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("beam", [1, 4])
def test_translations(twins, sentences, dictionary, beam: int, prepared: bool) -> None:
    source = sentences([5, 9, 3, 20])
    sample = {"net_input": {"src_tokens": source, "src_lengths": source.ne(dictionary.pad()).sum(dim=1)}}
    found = []
    for model in copy.deepcopy(twins):
        model.double() if not prepared else model.make_generation_fast_()
        search = FastBeamSearch([model], dictionary, Packing(), beam_size=beam, max_len_b=20)
        found.append(search.generate([model], sample))
    for plain, fast in zip(*found, strict=True):
        for ours, theirs in zip(fast, plain, strict=True):
            torch.testing.assert_close(ours["score"], theirs["score"], rtol=1e-4, atol=1e-4)
        assert torch.equal(plain[0]["tokens"], fast[0]["tokens"])


def test_a_copy_of_a_model_in_training_is_fast(build) -> None:
    """Weight normalisation makes a class for each module, whose base is exchanged; so does its removal."""
    model = build("convs2s_tiny")
    for each in (model, copy.deepcopy(model)):
        assert {"FastLinear", "FastGatedConvolution"} <= kinds(each)
        each.make_generation_fast_()
        assert {type(each.encoder.to_embedding), type(each.decoder.convolutions[0])} == {
            FastLinear,
            FastGatedConvolution,
        }
        assert each.decoder.convolutions[0].matrix.is_contiguous()
    plain = GatedConvolution(8, 8, kernel=3, causal=True)
    assert type(plain).__mro__[1] is GatedConvolution


@pytest.mark.parametrize("kernel", [1, 3, 4])
@torch.no_grad()
def test_convolutions_of_2016(kernel: int) -> None:
    torch.manual_seed(1)
    plain, x = Convolution(24, 40, kernel), torch.randn(3, 24, 7)
    plain.reset_parameters()
    fast = copy.deepcopy(plain)
    fast.__class__ = FastConvolution
    torch.testing.assert_close(fast(x), plain(x), rtol=1e-5, atol=1e-5)


def imports(path: Path) -> list[str]:
    nodes: list[ast.AST] = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    found = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return found + [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]


@pytest.mark.parametrize("room", ["nn", "models"])
def test_equations_know_no_processor(room: str) -> None:
    """Nor ask for one: what is behind `torch.cpu`, `mkldnn` and `quantized` is for the processors' room."""
    files = [*Path(fairseq_plugins.__file__).parent.joinpath(room).rglob("*.py")]
    assert len(files) > 10
    for path in files:
        assert not [name for name in imports(path) if name.startswith("fairseq_plugins.backends")], path
        text = path.read_text(encoding="utf-8")
        assert not [word for word in ("mkldnn", "torch.cpu.", "quantized", "prepack") if word in text], path


def test_a_room_may_be_imported_first() -> None:
    code = "from fairseq_plugins.backends import cpu; from fairseq_plugins.models.translation_model import *"
    code += "; assert TranslationModel.accelerate_ is cpu.accelerate_"
    subprocess.run([sys.executable, "-c", code], check=True)
