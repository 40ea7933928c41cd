"""Linear maps, block-diagonal products and each form of the convolutions, compared with torch's in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from hypothesis import HealthCheck, given, settings

from fairseq_plugins.common.decoding import RowOrder
from fairseq_plugins.common.weight_norm import without_weight_norm
from fairseq_plugins.convs2s.layers import GatedConvolution, PairedConvolution
from fairseq_plugins.cpu import convolution
from fairseq_plugins.cpu.convolution import (
    as_matrix,
    convolve_channels_first,
    convolve_time_first,
    packed_products,
    with_window_layout,
)
from fairseq_plugins.cpu.dropout_and_loss import label_smoothed_nll_loss
from fairseq_plugins.cpu.linear import _LargeLinear, _zen, add_block_diagonal, batched, linear, onednn_is_faster
from fairseq_plugins.cpu.packing import PackedWeightCache, has_onednn
from tests.common.stepwise import reorders
from tests.operators import Operators

onednn = pytest.mark.skipif(not has_onednn(), reason="this torch has no oneDNN")


@pytest.fixture
def products(prefer_onednn: Callable[[bool], None]) -> Iterator[Callable[[], int]]:
    """Choose oneDNN, and return a function that counts its products."""
    prefer_onednn(True)
    with Operators() as operators:
        yield lambda: operators.count("mkldnn._linear_pointwise")


@onednn
@pytest.mark.parametrize("shape", [(256, 96), (8, 32, 96)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_it_is_a_linear_map(products: Callable[[], int], shape: tuple[int, ...], bias: bool, transposed: bool) -> None:
    torch.manual_seed(1)
    x, w, b, g = torch.randn(shape), torch.randn(96, 128).t(), torch.randn(128) if bias else None, torch.randn(128)
    w = w if transposed else w.contiguous()
    results = []
    for multiply, dtype in ((linear, torch.float32), (F.linear, torch.float64)):
        inputs = [None if part is None else part.to(dtype).detach().requires_grad_() for part in (x, w, b)]
        y = multiply(*inputs)
        (y * g).sum().backward()
        results.append([y, *(part.grad for part in inputs if part is not None)])
    assert products() == 3
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)


@onednn
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("zen", "expected"), [(0, [0, 0]), (4, [2, 0]), (5, [3, 2])])
def test_products_that_need_a_copy(
    products: Callable[[], int], transposed: bool, zen: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Zen 4, oneDNN computes neither gradients of weights nor convolutions, for which it would copy an input."""
    monkeypatch.delenv("FAIRSEQ_PLUGINS_ONEDNN")
    monkeypatch.setattr("fairseq_plugins.cpu.linear._zen", lambda: zen)
    onednn_is_faster.cache_clear()
    x, w = torch.randn(256, 96, requires_grad=True), torch.randn(96, 128).t()
    w = (w if transposed else w.contiguous()).requires_grad_()
    y = linear(x, w)
    y.backward(torch.ones_like(y))
    torch.testing.assert_close(w.grad, y.new_ones(128, 256) @ x)
    assert w.grad.stride() == w.stride()
    counts = [products()]
    kernel = torch.randn(3, 96, 128, requires_grad=True)
    convolve_time_first(torch.randn(16, 8, 96), kernel, torch.zeros(128), (1, 1)).sum().backward()
    assert [*counts, products() - counts[0]] == expected


def cpuinfo(maker: str, family: int, flags: str = "fpu avx512f sse") -> str:
    one = f"vendor_id\t: {maker}\ncpu family\t: {family}\nmodel\t\t: 2\nflags\t\t: {flags}\n"
    return f"processor\t: 0\n{one}\nprocessor\t: 1\n{one}"


@pytest.fixture
def large(prefer_onednn: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Regard every output as large, and do not use oneDNN."""
    prefer_onednn(False)
    monkeypatch.setattr("fairseq_plugins.cpu.linear._LARGE", 0)
    monkeypatch.setattr("fairseq_plugins.cpu.linear._LargeLinear.blocks", {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_large_outputs_reuse_memory(large: None, dtype: torch.dtype, bias: bool, transposed: bool) -> None:
    """A batch's logits take the memory of earlier logits of at least the same size; all results are F.linear's."""
    torch.manual_seed(1)
    w, b = torch.randn(96, 128, dtype=dtype).t(), torch.randn(128, dtype=dtype) if bias else None
    w = w if transposed else w.contiguous()
    memories = []
    for sentences in (6, 4, 6, 7, 7):
        x = torch.randn(sentences, 5, 96, dtype=dtype)
        target = torch.randint(1, 128, (sentences * 5,))
        results = []
        for multiply in (partial(linear, reuse_memory=True), F.linear):
            inputs = [None if part is None else part.detach().requires_grad_() for part in (x, w, b)]
            logits = multiply(*inputs)
            loss, _ = label_smoothed_nll_loss(logits.flatten(0, 1), target, 0.1, 0, overwrite=multiply is not F.linear)
            if multiply is not F.linear:
                memories.append((logits.data_ptr(), logits.untyped_storage().nbytes()))
            loss.backward()
            results.append([loss, *(part.grad for part in inputs if part is not None)])
        torch.testing.assert_close(*results)
    assert memories[0] == memories[1] == memories[2] != memories[3] == memories[4]
    assert [size // w.element_size() for _, size in memories] == [30 * 128] * 3 + [35 * 128] * 2


def test_memory_in_use_is_not_reused(large: None) -> None:
    """Memory is reused only after a gradient has overwritten the logits and has been used."""
    x, w, target = torch.randn(5, 96), torch.randn(128, 96, requires_grad=True), torch.arange(5)

    def logits() -> torch.Tensor:
        return linear(x, w, reuse_memory=True)

    first = logits()
    gradient = torch.ones_like(first)
    first.backward(gradient)
    for _ in range(2):
        second = logits()
        assert torch.equal(first, second)
        assert gradient.eq(1).all()
        loss, _ = label_smoothed_nll_loss(second, target, 0.1, 0, overwrite=True)
        w.grad = None
        loss.backward(retain_graph=True)
        expected = w.grad.clone()
        loss.backward(retain_graph=True)
        torch.testing.assert_close(w.grad, 2 * expected)
    third, fourth = logits(), logits()
    assert len({each.data_ptr() for each in (first, third, fourth)}) == 3
    assert torch.equal(first, third)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_logits_in_reused_memory_are_no_views(large: None) -> None:
    """In-place operations are allowed, as on the output of F.linear."""
    x, w = torch.randn(5, 96), torch.randn(128, 96, requires_grad=True)
    linear(x, w, reuse_memory=True).relu_().sum().backward()
    torch.testing.assert_close(w.grad, (x @ w.t() > 0).float().t() @ x)


def test_logits_of_a_training_reuse_memory(build, task, sentences, architecture: str, large: None) -> None:
    model, target = build(architecture).train(), sentences([4, 2])
    inputs = {"src_tokens": sentences([5, 3]), "src_lengths": torch.tensor([5, 3]), "prev_output_tokens": target}
    criterion = LabelSmoothedCrossEntropyCriterion(task, False, 0.1)
    for _ in range(2):
        criterion(model, {"net_input": inputs, "target": target, "ntokens": 6})[0].backward()
        (block,) = _LargeLinear.blocks.values()
        memory = block.data_ptr()
    assert len(block) == target.numel() * len(task.target_dictionary)
    with torch.no_grad():
        model(**inputs)
    assert _LargeLinear.blocks
    assert model(**inputs)[0].data_ptr() == memory


@pytest.mark.parametrize(
    ("choice", "processor", "chosen"),
    [
        ("", cpuinfo("AuthenticAMD", 26), True),
        ("", cpuinfo("AuthenticAMD", 25), True),
        ("", cpuinfo("AuthenticAMD", 25, "fpu avx2 avx512"), False),  # Zen 3
        ("", cpuinfo("AuthenticAMD", 26, "fpu avx2"), True),  # a virtual machine may hide AVX-512
        ("", cpuinfo("GenuineIntel", 26), False),
        ("", "processor\t: 0\nCPU implementer\t: 0x41\n", False),
        ("0", cpuinfo("AuthenticAMD", 26), False),
        ("1", "", True),
    ],
)
def test_the_choice_of_the_library(monkeypatch, choice: str, processor: str, chosen: bool) -> None:
    """The choice depends on the CPU only: libraries round differently, and a resumed training must not change."""
    monkeypatch.setenv("FAIRSEQ_PLUGINS_ONEDNN", choice)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: processor)
    monkeypatch.setattr("fairseq_plugins.cpu.linear._zen", _zen.__wrapped__)
    assert onednn_is_faster.__wrapped__() is chosen


def test_an_invalid_choice(monkeypatch) -> None:
    monkeypatch.setenv("FAIRSEQ_PLUGINS_ONEDNN", "yes")
    with pytest.raises(ValueError, match="FAIRSEQ_PLUGINS_ONEDNN"):
        onednn_is_faster.__wrapped__()


def test_in_place_equals_batched() -> None:
    torch.manual_seed(1)
    y, x, w = (torch.randn(*shape).double().requires_grad_() for shape in ((5, 12), (5, 6), (3, 2, 4)))

    def add(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return add_block_diagonal(y.clone(), x, w)

    torch.testing.assert_close(add(y, x, w), batched(y, x, w))
    assert torch.autograd.gradcheck(add, (y, x, w))
    given = y.detach().clone()
    assert add_block_diagonal(given, x.detach(), w.detach()) is given


@pytest.mark.parametrize("form", ["torch", "oneDNN", "packed", "in pairs"])
@pytest.mark.parametrize(("kernel", "padding"), [(1, (0, 0)), (3, (2, 0)), (3, (1, 1)), (4, (1, 2))])
@pytest.mark.parametrize("laid_out", [False, True])
@torch.no_grad()
def test_time_first(
    prefer_onednn, monkeypatch, form: str, kernel: int, padding: tuple[int, int], laid_out: bool
) -> None:
    prefer_onednn(form == "oneDNN")
    monkeypatch.setattr(convolution, "NARROWEST", 0 if form == "in pairs" else 512)
    torch.manual_seed(1)
    x, weight, bias = torch.randn(9, 64, 48), torch.randn(kernel, 48, 96), torch.randn(96)
    if laid_out:
        weight = with_window_layout(weight)
        assert as_matrix(weight).is_contiguous()
    with PackedWeightCache().for_batch() as batch:
        y = convolve_time_first(x, weight, bias, padding, batch if form in ("packed", "in pairs") else None)
    columns = F.pad(x.double().permute(1, 2, 0), padding)
    expected = F.conv1d(columns, weight.double().permute(2, 1, 0), bias.double()).permute(2, 0, 1)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("kernel", "padding"), [(1, (0, 0)), (3, (1, 1)), (4, (1, 2))])
def test_channels_first(grad: bool, kernel: int, padding: tuple[int, int]) -> None:
    torch.manual_seed(1)
    x, weight, bias = torch.randn(3, 24, 7), torch.randn(40, 24, kernel), torch.randn(40)
    with torch.set_grad_enabled(grad):
        y = convolve_channels_first(x, weight, bias, padding)
    torch.testing.assert_close(y, F.conv1d(F.pad(x, padding), weight, bias), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not has_onednn(), reason="this torch cannot pack")
@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(decoding=reorders())
@torch.no_grad()
def test_steps_are_the_convolution_of_each_history(decoding: tuple[int, int, int, list[list[torch.Tensor]]]) -> None:
    sentences, beam, _, steps = decoding
    made = without_weight_norm(GatedConvolution(24, 32, 3, causal=True))
    made.bias.normal_()
    history, order = torch.zeros(sentences * beam, 2, 24), RowOrder(sentences * beam, beam)
    products = packed_products(made.matrix, made.bias, "float32")
    state = PairedConvolution(products, torch.zeros(sentences * beam, 24))
    for orders in steps:
        for new_order in orders:
            order.reorder(new_order)
            history = history[new_order]
        rows, _ = order.take_pending()
        x = torch.randn(history.size(0), 24)
        history = torch.cat([history, x.unsqueeze(1)], dim=1)
        expected = F.linear(history[:, -3:].flatten(1).double(), made.matrix.double(), made.bias.double())
        torch.testing.assert_close(state.step(x, rows).double(), F.glu(expected, dim=-1), rtol=1e-5, atol=1e-5)
