"""Encoders and the attentive LSTM, compared with the paper's equations; the places of dropout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fairseq_plugins.common.source import Source
from fairseq_plugins.conv_encoder.decoder import AttentiveLSTM
from fairseq_plugins.conv_encoder.model import Convolution
from fairseq_plugins.cpu import dropout_and_loss
from tests.conftest import random_model

LENGTHS = [6, 3, 1]
SMALL = {
    "encoder_embed_dim": 8,
    "encoder_layers": "[(12, 3)] * 3",
    "aggregation_layers": "[(10, 3)] * 2",
    "encoder_hidden_size": 5,
}


def embed(model, words: torch.Tensor) -> torch.Tensor:
    """Compute e_j = w_j + l_j for one sentence without padding."""
    embedding = model.encoder.embedding
    e = embedding.words(words)
    if embedding.positions is not None:
        first = embedding.padding_idx + 1
        e = e + embedding.positions.weight[first : first + len(words)]
    return e


def stack(cnn, e: torch.Tensor, residual: bool) -> torch.Tensor:
    """Convolve position by position, with zeros around the sentence; the longer half of a window is on the right."""
    x = cnn.from_embedding(e)
    outputs = [x]
    for layer, shortcut, distance in zip(cnn.convolutions, cnn.shortcuts, cnn.residuals, strict=True):
        _, in_dim, kernel = layer.weight.shape
        around = nn.functional.pad(x, (0, 0, kernel - 1, kernel))
        out = []
        for j in range(len(x)):
            first = j + kernel - 1 - (kernel - 1) // 2
            window = around[first : first + kernel]  # (k, d)
            y = (torch.einsum("odk,kd->o", layer.weight, window) + layer.bias) / in_dim**0.5
            if residual:
                start = outputs[-distance][j]
                if isinstance(shortcut, nn.Conv1d):
                    start = shortcut.weight[..., 0] @ start + shortcut.bias
                y = y + start
            out.append(torch.tanh(y))
        x = torch.stack(out)
        outputs.append(x)
    return cnn.to_embedding(x)


def pooled(e: torch.Tensor) -> torch.Tensor:
    return torch.stack([sum(e[max(j - 2, 0) : j + 3]) / 5 for j in range(len(e))])


def lstm(encoder, e: torch.Tensor) -> torch.Tensor:
    x = e.unsqueeze(0)
    for layer in encoder.stacks[0]:
        x, _ = layer(x)
    return encoder.to_embedding(x[0])


def bilstm(encoder, e: torch.Tensor) -> torch.Tensor:
    """Section 2: reverse the output of each layer before the next layer, then align the outputs."""
    outputs = []
    for stack, start in zip(encoder.stacks, (e, e.flip(0)), strict=True):
        x, backwards = start, start is not e
        for number, lstm in enumerate(stack):
            if number > 0:
                x, backwards = x.flip(0), not backwards
            x = lstm(x.unsqueeze(0))[0][0]
        outputs.append(x.flip(0) if backwards else x)
    return encoder.to_embedding(torch.cat(outputs, dim=1))


OPTIONS = {
    "convolutional": {},
    "no residual": {"no_residual": True},
    "one stack": {"single_stack": True},
    "no CNN-c": {"aggregation_layers": "[]"},
    "all kinds of layers": {"encoder_layers": "[(12, 3), (14, 2), (10, 4, 2), (10, 1, 3)]"},
    "no positions": {"no_encoder_positional_embeddings": True},
    "pooling": {"encoder_type": "pooling"},
    "lstm": {"encoder_type": "lstm"},
    "lstm, 2 layers": {"encoder_type": "lstm", "encoder_lstm_layers": 2},
    "lstm, positions": {"encoder_type": "lstm", "encoder_lstm_positional_embeddings": True},
    "bilstm": {"encoder_type": "bilstm"},
    "bilstm, positions": {"encoder_type": "bilstm", "encoder_lstm_positional_embeddings": True},
    "bilstm, 2 layers": {"encoder_type": "bilstm", "encoder_lstm_layers": 2},
    "bilstm, 3 layers": {"encoder_type": "bilstm", "encoder_lstm_layers": 3},
}


@pytest.mark.parametrize("left_pad", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
@torch.no_grad()
def test_encoder(build, sentences, dictionary, name: str, left_pad: bool) -> None:
    model = build("conv_encoder_tiny", **{**SMALL, **OPTIONS[name]}).double()
    encoder, batch = model.encoder, sentences(LENGTHS, left_pad)
    source = encoder(batch)
    for row, words in enumerate(batch):
        present = words.ne(dictionary.pad())
        e = embed(model, words[present])
        assert encoder.embedding.positional == (name != "no positions" and ("lstm" not in name or "positions" in name))
        if "bilstm" in name:
            keys = values = bilstm(encoder, e)
        elif "lstm" in name:
            keys = values = lstm(encoder, e)
        elif name == "pooling":
            keys, values = pooled(e), e
        else:
            residual = name != "no residual"
            keys = stack(encoder.cnn_a, e, residual)
            values = keys if name == "one stack" else stack(encoder.cnn_c, e, residual)
            assert (name == "no CNN-c") == torch.equal(values, e)
        torch.testing.assert_close(source.keys[row, present], keys)
        torch.testing.assert_close(source.values[row, present], values)


@pytest.mark.parametrize("options", [{"no_residual": True}, {"encoder_layers": "[(12, 3), (10, 3, 0), (8, 3)]"}])
def test_every_parameter_is_used(build, sentences, options: dict) -> None:
    """Distributed training would wait forever for the gradient of an unused parameter."""
    model = build("conv_encoder_tiny", **{"encoder_layers": "[(12, 3), (10, 3)]", **options})
    source, target = sentences(LENGTHS), sentences([4, 2, 1])
    model(source, None, target)[0].sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("encoder", ["convolutional", "pooling", "lstm", "bilstm"])
def test_autocast(build, sentences, encoder: str) -> None:
    """Under autocast (--amp, here in bfloat16), parameters stay in float32, but products do not."""
    model = build("conv_encoder_tiny", encoder_type=encoder, decoder_layers=2).train()
    for parameter in model.parameters():
        parameter.data.mul_(0.5)  # otherwise attention is so sharp that rounding errors decide its position
    source, target = sentences(LENGTHS), sentences([4, 2, 1])
    # oneDNN's LSTM refuses bfloat16 on CPUs without bfloat16 instructions; torch's own LSTM does not.
    with (
        torch.backends.mkldnn.flags(enabled=torch.cpu._is_avx512_bf16_supported()),
        torch.autocast("cpu", torch.bfloat16),
    ):
        torch.manual_seed(1)
        actual, _ = model(source, None, target)
    actual.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    torch.manual_seed(1)
    expected, _ = model(source, None, target)
    torch.testing.assert_close(actual.float(), expected, rtol=0.05, atol=0.004)


def test_initialisation(task) -> None:
    """Section 4.2: weights are within 0.05, and biases zero; convolutions have another bound, and nonzero biases."""
    _, model = random_model("conv_encoder_iwslt_de_en", task, **SMALL)
    for module in model.modules():
        if isinstance(module, Convolution):
            bound = module.weight[0].numel() ** -0.5 / module.scale
            assert 0.95 * bound < module.weight.abs().max() <= bound * 1.00001
            assert module.bias.all()
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if "bias" in name:
                assert not parameter.any(), name
            elif parameter.numel() > 100:
                assert 0.95 * 0.05 < parameter.abs().max() <= 0.05, name
    assert not model.encoder.embedding.words.weight[task.source_dictionary.pad()].any()


def plain(convolution: Convolution) -> nn.Conv1d:
    out_dim, in_dim, kernel = convolution.weight.shape
    layer = nn.Conv1d(in_dim, out_dim, kernel, padding=kernel // 2)
    with torch.no_grad():
        layer.weight.copy_(convolution.weight / in_dim**0.5)
        layer.bias.copy_(convolution.bias / in_dim**0.5)
    return layer


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_convolutions_learn_slower(optimizer: type[torch.optim.Optimizer]) -> None:
    """Section 4.3: steps are divided by the root of the input width; the gradient of the layer below is unchanged."""
    torch.manual_seed(1)
    convolution, x = Convolution(16, 8, 3), torch.randn(2, 16, 5, requires_grad=True)
    convolution.reset_parameters()
    layer, before = plain(convolution), plain(convolution)
    gradients = []
    for module in (convolution, layer):
        module(x).square().sum().backward()
        gradients.append(x.grad.clone())
        x.grad = None
        optimizer(module.parameters(), lr=0.01).step()
    torch.testing.assert_close(*gradients)
    after = plain(convolution)
    for name in ("weight", "bias"):
        step, full_step = (getattr(each, name) - getattr(before, name) for each in (after, layer))
        torch.testing.assert_close(step, full_step / 4)


BATCH, TARGET, SOURCE, EMBED, HIDDEN = 3, 6, 5, 4, 7


def by_the_equations(lstm: AttentiveLSTM, g: Tensor, source: Source) -> tuple[Tensor, Tensor]:
    """Compute section 2 of Gehring et al. 2016 with torch's LSTM cell."""
    cell = nn.LSTMCell(2 * EMBED, HIDDEN, dtype=g.dtype)
    del cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh
    cell.weight_ih = torch.cat([lstm.input.weight, lstm.conditional_input.weight], dim=1)  # multiplies [g_i c_i]
    cell.weight_hh, cell.bias_ih = lstm.recurrent.weight, lstm.input.bias
    cell.bias_hh = torch.zeros_like(lstm.input.bias)
    h = c = g.new_zeros(len(g), HIDDEN)
    states, attention = [], []
    for g_i in g.unbind(dim=1):
        d = lstm.query(h) + g_i
        scores = (source.keys * d.unsqueeze(1)).sum(dim=2).masked_fill(source.padding_mask, float("-inf"))
        a = scores.softmax(dim=1)
        conditional_input = (a.unsqueeze(2) * source.values).sum(dim=1)
        h, c = cell(torch.cat([g_i, conditional_input], dim=1), (h, c))
        states.append(h)
        attention.append(a)
    return torch.stack(states, dim=1), torch.stack(attention, dim=1)


@pytest.fixture
def inputs() -> tuple[AttentiveLSTM, Tensor, Source]:
    torch.manual_seed(1)
    lstm = AttentiveLSTM(EMBED, HIDDEN).double()
    g = torch.randn(BATCH, TARGET, EMBED, dtype=torch.float64, requires_grad=True)
    keys, values = (torch.randn(BATCH, SOURCE, EMBED, dtype=torch.float64, requires_grad=True) for _ in range(2))
    padding = torch.arange(SOURCE) >= torch.tensor([5, 2, 1]).unsqueeze(1)
    return lstm, g, Source(keys, values, padding)


def test_values_and_gradients(inputs: tuple[AttentiveLSTM, Tensor, Source]) -> None:
    lstm, g, source = inputs
    leaves = [g, source.keys, source.values, *lstm.parameters()]
    actual, expected = lstm(g, source), by_the_equations(lstm, g, source)
    weights = torch.randn_like(expected[0])
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad((h * weights).sum(), leaves) for h, _ in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


def test_some_inputs_without_gradient(inputs: tuple[AttentiveLSTM, Tensor, Source]) -> None:
    """If embeddings are frozen, for example, only some inputs need a gradient."""
    lstm, g, source = inputs
    h, a = lstm(g.detach(), Source(source.keys.detach(), source.values, source.padding_mask))
    assert not a.requires_grad
    h.sum().backward()
    expected, _ = by_the_equations(lstm, g, source)
    torch.testing.assert_close(source.values.grad, torch.autograd.grad(expected.sum(), source.values)[0])


@pytest.fixture
def every_third(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace dropout by one that drops every third number of each vector, without scaling."""

    def drop(x: torch.Tensor, p: float) -> torch.Tensor:
        return x * (torch.arange(x.size(-1), device=x.device) % 3 != 0) if p > 0 else x

    monkeypatch.setattr(dropout_and_loss, "dropout", drop)


def collect_inputs(module: nn.Module) -> list[torch.Tensor]:
    """Return a list that collects the module's inputs from now on."""
    seen: list[torch.Tensor] = []
    module.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    return seen


def assert_dropped(x: torch.Tensor, expected: bool = True) -> None:
    zero = (x.flatten(0, -2) == 0).all(dim=0).tolist()
    assert zero == [expected and number % 3 == 0 for number in range(x.size(-1))]


@pytest.mark.usefixtures("every_third")
@pytest.mark.parametrize("p", [0.5, 0.0])
def test_between_the_layers_of_a_bilstm(build, sentences, p: float) -> None:
    """Dropout applies to embeddings, to the input of each layer except the first, and to the output."""
    model = build("conv_encoder_tiny", encoder_type="bilstm", encoder_lstm_layers=3, dropout=p).train()
    layers = [[collect_inputs(lstm) for lstm in stack] for stack in model.encoder.stacks]
    source = model.encoder(sentences([5, 5]))
    for stack in layers:
        for (x,) in stack:
            assert_dropped(x, p > 0)
    assert_dropped(source.keys, p > 0)


@pytest.mark.usefixtures("every_third")
@pytest.mark.parametrize("p", [0.5, 0.0])
def test_between_the_lstms_of_the_decoder(build, sentences, p: float) -> None:
    """Dropout applies to embeddings, to the input of each LSTM except the first, and to the output."""
    model = build("conv_encoder_tiny", decoder_layers=3, dropout=p).train()
    decoder = model.decoder
    seen = [collect_inputs(module) for module in (decoder.attentive, *decoder.upper, decoder.output_projection)]
    encoded = model.encoder(sentences([5, 3]))
    decoder(sentences([4, 4]), encoded)
    for (x,) in seen:
        assert_dropped(x, p > 0)


@pytest.mark.usefixtures("every_third")
def test_on_embeddings_only(build, sentences) -> None:
    """The paper has "dropout on the embeddings and decoder outputs", and none between convolutions."""
    model = build("conv_encoder_tiny", dropout=0.5).train()
    stacks = [
        [collect_inputs(layer) for layer in stack.convolutions] for stack in (model.encoder.cnn_a, model.encoder.cnn_c)
    ]
    model.encoder(sentences([5, 5]))
    for (first,), *others in stacks:
        assert_dropped(first.transpose(1, 2))
        for (x,) in others:
            assert_dropped(x.transpose(1, 2), False)
