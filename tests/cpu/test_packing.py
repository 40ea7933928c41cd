"""Packed products, compared with float64, and packing of changed weights."""

from __future__ import annotations

import copy
import logging
import math
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from fairseq_plugins.cpu.linear import linear
from fairseq_plugins.cpu.packing import (
    PRECISIONS,
    PackedLinear,
    PackedWeightCache,
    cached,
    has_onednn,
    prepare_linear,
    quantise,
)

pytestmark = pytest.mark.skipif(not has_onednn(), reason="this torch cannot pack")
SUPPORTED = [name for name, (_, is_supported) in PRECISIONS.items() if is_supported()]


def layer(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(96, 64, generator=generator), torch.randn(96, generator=generator)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("rows", [1, 7, 80])
@torch.no_grad()
def test_errors_are_those_of_the_precision(precision: str, rows: int) -> None:
    """Bounds: half a unit in the last place of weights, inputs and outputs; in int8, half a step of both factors."""
    if precision not in SUPPORTED:
        pytest.skip(f"this processor has no {precision}")
    weight, bias = layer()
    x = torch.randn(rows, 64)
    exact = F.linear(x.double(), weight.double(), bias.double())
    products = F.linear(x.abs(), weight.abs(), bias.abs())  # relative errors refer to these numbers
    step = (x.max() - x.min()) / (255 if torch.cpu._is_vnni_supported() else 127)
    steps = F.linear(torch.ones(rows, 64), weight.abs()) * step
    steps += F.linear(x.abs() + step, weight.abs().amax(1, keepdim=True).expand(-1, 64)) / 127
    bound = {"float32": products * 64 * 2**-23, "bfloat16": products * 3 * 2**-8, "int8": steps}[precision]
    with PackedWeightCache(precision).for_batch() as batch:
        y = prepare_linear(weight, bias, rows, batch)(x)
    assert y.dtype == torch.float32
    assert ((y - exact).abs() <= bound).all()
    if precision != "float32":
        assert (y - exact).abs().max() > products.max() * 64 * 2**-23  # the precision is lower than float32


@pytest.mark.skipif("int8" not in SUPPORTED, reason="this processor has no int8")
def test_inputs_have_256_steps_unless_sums_would_overflow() -> None:
    found = PackedLinear(torch.ones(1, 1), None, "int8")(torch.arange(256.0).unsqueeze(1))
    assert len(found.unique()) == (256 if torch.cpu._is_vnni_supported() else 128)


def test_a_row_of_zeros_has_a_step_size() -> None:
    """A step of size zero would give 0/0."""
    steps, scale = quantise(torch.tensor([[0.0, 0.0], [1.0, -127.0]]))
    assert steps.tolist() == [[0, 0], [1, -127]]
    assert scale[0] > 0
    assert scale[1] == 1


@pytest.mark.parametrize("rows", [1, 7, 80])
@torch.no_grad()
def test_sums_of_int8_do_not_overflow(rows: int) -> None:
    """A CPU that adds two products in 16 bits overflows for the largest numbers."""
    if "int8" not in SUPPORTED:
        pytest.skip("this processor has no int8")
    packed = PackedLinear(torch.ones(96, 64), None, "int8")
    torch.testing.assert_close(packed(torch.ones(rows, 64)), torch.full((rows, 96), 64.0))


def swapped(weight: torch.Tensor) -> torch.Tensor:
    """Swap two columns that a sum over a row adds early, so that the sum stays bitwise equal."""
    columns = torch.arange(64)
    columns[[0, 32]] = columns[[32, 0]]
    return weight[:, columns]


CHANGES: dict[str, Callable[[torch.nn.Linear], object]] = {
    "of one number, without version counter": lambda module: module.weight.data[3, 5].add_(1),
    "of the bias": lambda module: module.bias.data.add_(0.01),
    "of the order of its rows": lambda module: module.weight.data.copy_(module.weight.data.flip(0)),
    "of two swapped columns": lambda module: module.weight.data.copy_(swapped(module.weight.data)),
    "of the whole": lambda module: module.load_state_dict(dict(zip(("weight", "bias"), layer(2), strict=True))),
}


@pytest.mark.parametrize("precision", SUPPORTED)
@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_a_weight_that_changes_is_packed_again(precision: str, change: str) -> None:
    module, x = torch.nn.Linear(64, 96), torch.randn(5, 64)
    module.load_state_dict(dict(zip(("weight", "bias"), layer(), strict=True)))
    weight_cache = PackedWeightCache(precision)
    with weight_cache.for_batch() as batch:
        before = prepare_linear(module.weight, module.bias, 5, batch)(x)
    CHANGES[change](module)
    with weight_cache.for_batch() as batch:
        after = prepare_linear(module.weight, module.bias, 5, batch)(x)
    with PackedWeightCache(precision).for_batch() as batch:
        expected = prepare_linear(module.weight, module.bias, 5, batch)(x)
    assert torch.equal(after, expected)
    assert not torch.equal(after, before)


@torch.no_grad()
def test_entries_are_kept_while_batches_use_them() -> None:
    weight_cache, (weight, bias), (other, _) = PackedWeightCache(), layer(1), layer(2)
    made: list[torch.Tensor] = []

    def pack(weight: torch.Tensor, bias: torch.Tensor | None, precision: str) -> PackedLinear:
        made.append(weight)
        return PackedLinear(weight, bias, precision)

    counts = []
    for weights in [[weight], [weight], [weight, other], [other], [other], [weight, other]]:
        with weight_cache.for_batch() as batch:
            for each in weights:
                batch.packed(pack, each, bias)
                batch.packed(pack, each.clone(), bias)
        counts.append(len(made))
        made.clear()
    assert counts == [1, 0, 1, 0, 0, 1]


@pytest.mark.parametrize("change", [None, *CHANGES])
@torch.no_grad()
def test_cached_values_are_kept_until_weights_change(change: str | None) -> None:
    module, x, weight_cache, calls = torch.nn.Linear(64, 96), torch.randn(5, 64), PackedWeightCache(), []

    def double(weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(weight)
        return 2 * weight, 2 * bias

    module.load_state_dict(dict(zip(("weight", "bias"), layer(), strict=True)))
    for _ in range(2):
        with weight_cache.for_batch() as batch:
            for _ in range(2):
                weight, bias = cached(batch, double, module.weight, module.bias)
                y = prepare_linear(weight, bias, 5, batch)(x)
            half, _ = cached(batch, lambda weight, bias: (weight / 2, bias), module.weight, module.bias)
        torch.testing.assert_close(y, 2 * F.linear(x, module.weight, module.bias), rtol=1e-4, atol=1e-4)
        assert torch.equal(half, module.weight / 2)
        if change is not None:
            CHANGES[change](module)
    assert len(calls) == (2 if change else 1)


@torch.no_grad()
def test_a_weight_and_its_transpose_are_two_entries() -> None:
    weight, x, weight_cache = torch.randn(64, 64), torch.randn(5, 64), PackedWeightCache()
    with weight_cache.for_batch() as batch:
        for each in (weight, weight.t(), weight.t().contiguous()):
            torch.testing.assert_close(prepare_linear(each, None, 5, batch)(x), F.linear(x, each))


def test_gradients_are_never_lost() -> None:
    (weight, bias), x = layer(), torch.randn(64, 64, 64)
    weight.requires_grad_()
    with PackedWeightCache("int8").for_batch() as batch:
        linear(x, weight, bias, batch).sum().backward()
    torch.testing.assert_close(weight.grad, x.sum(dim=(0, 1)).expand_as(weight), rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
@torch.no_grad()
def test_unsupported_precisions_fall_back_to_float32(precision: str, monkeypatch, caplog) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx2_supported", lambda: False)
    with caplog.at_level(logging.WARNING):
        weight_cache = PackedWeightCache(precision)
    assert f"--cpu-dtype {precision}: " in caplog.text
    (weight, bias), x = layer(), torch.randn(5, 64)
    with weight_cache.for_batch() as batch:
        torch.testing.assert_close(prepare_linear(weight, bias, 5, batch)(x), F.linear(x, weight, bias))


@pytest.mark.parametrize("precision", SUPPORTED)
def test_a_useless_precision_is_reported_once(precision: str, caplog) -> None:
    weight_cache = PackedWeightCache(precision)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with weight_cache.for_batch():
                pass
    assert caplog.text.count(f"--cpu-dtype {precision} ") == (precision != "float32")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda weight_cache: pickle.loads(pickle.dumps(weight_cache))])
@pytest.mark.parametrize("precision", SUPPORTED)
@torch.no_grad()
def test_a_copy_packs_the_same(precision: str, copied: Callable[[PackedWeightCache], PackedWeightCache]) -> None:
    (weight, bias), x, weight_cache = layer(), torch.randn(5, 64), PackedWeightCache(precision)
    with weight_cache.for_batch() as batch:
        expected = prepare_linear(weight, bias, 5, batch)(x)
    weight_cache = copied(weight_cache)
    with weight_cache.for_batch() as batch:
        assert torch.equal(prepare_linear(weight, bias, 5, batch)(x), expected)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("precision", SUPPORTED)
@torch.no_grad()
def test_numbers_that_are_not_finite(precision: str, broken: float) -> None:
    """Infinity or NaN in a row of the input or of the weight affects only the outputs of this row, as in float32."""
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(2, 5, 64, generator=generator), torch.rand(96, 64, generator=generator) + 0.5
    weight[::2] *= -1
    whole, spoilt, spoilt_weight = x.clone(), x.clone(), weight.clone()
    whole[1, 2] = 0
    spoilt[1, 2, 7] = broken
    spoilt_weight[3, 4] = broken
    with PackedWeightCache(precision).for_batch() as batch:
        expected, actual = (prepare_linear(weight, None, 10, batch)(each) for each in (whole, spoilt))
        of_weight = prepare_linear(spoilt_weight, None, 10, batch)(x)
    torch.testing.assert_close(actual[1, 2], F.linear(spoilt, weight)[1, 2], equal_nan=True)
    actual[1, 2] = expected[1, 2]
    torch.testing.assert_close(actual, expected)
    assert torch.equal(of_weight.isfinite(), F.linear(x, spoilt_weight).isfinite())


def test_a_packed_map_copies_the_bias() -> None:
    """The owner may modify the bias while the map is in use."""
    weight, bias, x = torch.randn(8, 4), torch.randn(8), torch.randn(3, 4)
    packed = PackedLinear(weight, bias)
    before = packed(x)
    bias.add_(1)
    assert torch.equal(packed(x), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 7, 80])
@pytest.mark.parametrize("contiguous", [True, False])
@torch.no_grad()
def test_equals_linear(dtype: torch.dtype, rows: int, contiguous: bool) -> None:
    torch.manual_seed(1)
    weight = torch.randn(33, 48, dtype=dtype) if contiguous else torch.randn(48, 33, dtype=dtype).t()
    bias = torch.randn(33, dtype=dtype)
    apply = prepare_linear(weight, bias, rows)
    for fewer in {rows, max(1, rows // 2), 1}:
        x = torch.randn(fewer, 48, dtype=dtype)
        torch.testing.assert_close(apply(x), F.linear(x, weight, bias))
