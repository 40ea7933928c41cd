"""Step-by-step decoding of every family, and re-orders that break its contract."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq.modules import FairseqDropout
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_plugins.common.decoding import RowOrder
from fairseq_plugins.common.source import Source
from fairseq_plugins.cpu import dropout_and_loss
from fairseq_plugins.search.graphs import tensors_of
from tests.common.stepwise import close
from tests.conftest import random_model
from tests.operators import Operators

# The models of other families have several layers already, with dropout between the layers.
LAYERS = {"conv_encoder_tiny": {"decoder_layers": 2}}
# The dropout of attention's weights is inside torch's own function.
RETAINED = {**LAYERS, "weighted_transformer_tiny": {"attention_dropout": 0.0}}


@torch.no_grad()
def test_several_tokens_at_once(build, architecture, sentences) -> None:
    """fairseq's fconv silently uses only the last token."""
    model = build(architecture)
    encoded, target = model.encoder(sentences([5, 3])), sentences([7, 7])
    expected, _ = model.decoder(target, encoded)
    state: dict = {}
    first, _ = model.decoder(target[:, :3], encoded, incremental_state=state)
    rest, _ = model.decoder(target, encoded, incremental_state=state)
    close(torch.cat([first, rest], dim=1), expected)
    for given in (1, 7):
        with pytest.raises(ValueError, match=f"{given} tokens, and 7 "):
            model.decoder(target[:, -given:], encoded, incremental_state=state)
    beams = encoded.reorder(torch.arange(6, device=target.device) // 3)
    with pytest.raises(ValueError, match=r"2 rows, .* 2 sentences of 3 rows"):
        model.decoder(target[:, :1], beams, incremental_state={})


@torch.no_grad()
def test_weights_never_go_stale(build, architecture, sentences) -> None:
    """After any change of the weights, the next batch is decoded with the current weights."""
    model, other = build(architecture), build(architecture, seed=3).state_dict()  # seed 2 rounds ten times as much
    first = build(architecture).state_dict()
    encoded, target = model.encoder(sentences([5, 3])), sentences([4, 4])

    def check() -> None:
        expected, _ = model.decoder(target, encoded)
        close(model.decoder(target, encoded, incremental_state={})[0], expected)

    check()
    for parameter in model.parameters():
        parameter.data.mul_(1.1)  # like fairseq's optimizers: autograd's version counters do not notice
    check()
    model.load_state_dict(other)
    check()
    model.make_generation_fast_(need_attn=False)
    check()
    # Load a training checkpoint into a model prepared for inference.
    model.load_state_dict({name: (value + first[name]) / 2 for name, value in other.items()})
    check()
    for parameter in model.parameters():
        parameter.data.mul_(0.9)
    check()


@pytest.mark.parametrize("rows", [[1, 0, 1], [1, 0]])
@torch.no_grad()
def test_rows_that_do_not_form_beams(build, architecture, sentences, device, rows: list[int]) -> None:
    """Sentences are re-ordered before decoding, so rows do not form beams, and each row is a sentence of its own."""
    if device.type != "cpu" and len(rows) == 2:
        pytest.skip("an assertion of a GPU ends its process")
    model = build(architecture)
    encoded = model.encoder.reorder_encoder_out(model.encoder(sentences([5, 3])), torch.tensor(rows, device=device))
    target = sentences([4] * len(rows))
    expected, _ = model.decoder(target, encoded)
    close(model.decoder(target, encoded, incremental_state={})[0], expected)


@torch.no_grad()
def test_attention_is_returned_only_where_it_may_be_read(build, architecture, sentences) -> None:
    """Models in training, or prepared without attention (fairseq's default), return no attention, also in steps."""
    model = build(architecture)
    encoded, target = model.encoder(sentences([5, 3])), sentences([4, 4])

    def told() -> list[bool]:
        both = [model.decoder(target, encoded, incremental_state=state)[1]["attn"] for state in (None, {})]
        assert all(attention is None or attention.shape == (2, 4, 5) for (attention,) in both)
        return [attention is not None for (attention,) in both]

    assert told() == [True, True]
    model.train()
    assert told() == [False, False]
    model.eval()
    model.decoder.make_generation_fast_()
    assert told() == [False, False]
    model.decoder.make_generation_fast_(need_attn=True)
    assert told() == [True, True]


def test_targets_padded_on_the_left_are_refused(task, architecture) -> None:
    left = SimpleNamespace(**vars(task), cfg=SimpleNamespace(left_pad_target=True))
    with pytest.raises(ValueError, match="--left-pad-target"):
        random_model(architecture, left)


@torch.no_grad()
def test_steps_under_autocast(build, architecture, sentences, device) -> None:
    """Packed weights accept only inputs of their own precision, and autocast changes the inputs' precision."""
    model = build(architecture)
    order = torch.arange(2, device=device).repeat_interleave(3)
    with torch.autocast(device.type, torch.bfloat16):
        encoded = model.encoder.reorder_encoder_out(model.encoder(sentences([5, 3])), order)
        logits, _ = model.decoder(sentences([4] * 6), encoded, incremental_state={})
        expected, _ = model.decoder(sentences([4] * 6), encoded)
    torch.testing.assert_close(logits.float(), expected.float(), rtol=0.1, atol=0.2)


@torch.no_grad()
def test_retained_dropout_is_the_same_in_steps(build, architecture, sentences, monkeypatch) -> None:
    """With --retain-dropout, a dropout of every third number of a vector hits the same places in steps and at once."""

    def every_third(x: torch.Tensor, p: float) -> torch.Tensor:
        return x * (torch.arange(x.size(-1), device=x.device) % 3 != 0) / (1 - p) if p > 0 else x

    model = build(architecture, dropout=0.3, **RETAINED.get(architecture, {}))
    encoded, target = model.encoder(sentences([5, 3])), sentences([4, 4])
    without, _ = model.decoder(target, encoded)
    model.decoder.make_generation_fast_(need_attn=True)
    for module in model.modules():
        if isinstance(module, FairseqDropout):
            module.make_generation_fast_(type(module).__name__, retain_dropout=True)
    monkeypatch.setattr(dropout_and_loss, "dropout", every_third)
    expected, _ = model.decoder(target, encoded)
    close(model.decoder(target, encoded, incremental_state={})[0], expected)
    assert float((expected - without).abs().max()) > 0.1


@torch.no_grad()
def test_attention_is_a_softmax_in_float32(build, architecture, sentences) -> None:
    """Half-precision models compute the softmax in float32, at once and in steps, except in torch's fused attention."""
    model = build(architecture).bfloat16()
    encoded, target = model.encoder(sentences([5, 3])), sentences([3, 3])
    for state in (None, {}):
        with Operators() as operators:
            logits, _ = model.decoder(target, encoded, incremental_state=state)
        assert logits.dtype == torch.bfloat16
        assert operators.dtypes("aten._softmax") == {torch.float32}


@torch.no_grad()
def test_a_fixed_state_keeps_its_addresses(build, architecture, sentences, device) -> None:
    """The state has room for twenty steps and then grows by nine; rows are re-ordered before each step."""
    model = build(architecture, **LAYERS.get(architecture, {})).double()
    encoded, rows = model.encoder(sentences([5, 3])), torch.arange(6, device=device)
    beams = encoded.reorder(rows // 3)
    decoding = model.decoder.start(encoded, 3, capacity=20)
    places = [tensor.data_ptr() for tensor in tensors_of(decoding)]
    order = torch.tensor([1, 1, 0, 5, 3, 3], device=device)
    words = sentences([29] * 6)
    tokens = words[:, :0]
    for step in range(29):
        if step == 20:
            assert [tensor.data_ptr() for tensor in tensors_of(decoding)] == places
            decoding.grow(9)
        tokens = torch.cat([tokens[order], words[:, step : step + 1]], dim=1)
        features, attention = decoding.step(tokens[:, -1], order)
        expected, extra = model.decoder(tokens, beams)
        close(decoding.output_layer(features), expected[:, -1])
        close(attention, extra["attn"][0][:, -1])


def test_orders_that_break_the_contract_are_refused() -> None:
    """Try all orders of two or four of four rows, with two rows per sentence, and impossible numbers of rows."""
    for left in (2, 4):
        for rows in itertools.product(range(4), repeat=left):
            sentences = [row // 2 for row in rows]
            allowed = sentences[::2] == sentences[1::2] and (left < 4 or sentences[::2] == [0, 1])
            with nullcontext() if allowed else pytest.raises(RuntimeError):
                RowOrder(rows=4, beam=2).reorder(torch.tensor(rows))
    order = RowOrder(rows=6, beam=2)
    for count in (3, 8):
        with pytest.raises(RuntimeError, match=f"{count} rows"):
            order.reorder(torch.arange(count))
    order.reorder(torch.tensor([0, 1, 4, 5]))
    with pytest.raises(RuntimeError, match="6 rows"):
        order.reorder(torch.arange(6))


def test_orders_between_two_steps_are_combined() -> None:
    """An order is applied to the rows as earlier orders have moved them."""
    order = RowOrder(rows=6, beam=3)
    order.reorder(torch.tensor([1, 2, 0, 4, 4, 3]))
    order.reorder(torch.tensor([0, 0, 1, 5, 3, 4]))
    assert order.take_pending()[0].tolist() == [1, 1, 2, 3, 4, 4]


class Asserted(TorchDispatchMode):
    """Collect the assertions that run on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.asserted: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._assert_async.msg:
            self.asserted.append(args[0])
        return func(*args, **(kwargs or {}))


def test_the_device_checks_orders_and_rows_without_synchronisation() -> None:
    """On a fake GPU, reading a tensor's value raises an error."""
    with FakeTensorMode(), Asserted() as mode:
        empty = partial(torch.empty, dtype=torch.long, device="cuda")
        order = RowOrder(rows=6, beam=2)
        order.reorder(empty(6))
        order.reorder(empty(4))
        keys = empty(3, 5, 8, dtype=torch.float32)
        source = Source(keys, keys, empty(3, 5, dtype=torch.bool)).reorder(empty(6))
        assert source.group()[1] == 2
    assert [(value.device.type, value.shape) for value in mode.asserted] == [("cuda", ())] * 3
