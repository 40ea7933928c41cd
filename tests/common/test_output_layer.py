"""Compare a model that outputs only candidate words with the same columns of the whole model's output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq.models import BaseFairseqModel
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from fairseq_plugins.common.output_layer import candidate_output, selected_rows, with_candidate_output
from tests.conftest import ARCHITECTURES
from tests.search.searching import FAIRSEQ_MODELS, fairseq_model

CANDIDATES = [0, 1, 2, 3, 7, 20, 21, 43]
TIED = {
    "convs2s_tiny": {"share_input_output_embed": True},
    "fconv": {"share_input_output_embed": True},
    "transformer_tiny": {"share_decoder_input_output_embed": True},
}
Model = Callable[[], BaseFairseqModel]


def name_of(case: tuple[str, dict[str, Any]]) -> str:
    return case[0] + ("-tied" if case[1] else "")


@pytest.fixture(params=[*((name, {}) for name in (*ARCHITECTURES, *FAIRSEQ_MODELS)), *TIED.items()], ids=name_of)
def model(request: pytest.FixtureRequest, build: Any, task: SimpleNamespace, device: torch.device) -> Model:
    """Return a function that builds the same random model at each call, in float64."""
    name, options = request.param
    if name == "lstm":
        request.getfixturevalue("_without_cudnn")
    if name in FAIRSEQ_MODELS:
        return lambda: fairseq_model(name, task, **options).to(device).double()
    return lambda: build(name, **options).double()


@pytest.fixture
def inputs(sentences: Callable[..., Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    source = sentences([6, 4, 1])
    return source, source.ne(1).sum(dim=1), sentences([5, 4, 3], seed=2)


@contextmanager
def twin(model: BaseFairseqModel, candidates: Tensor) -> Iterator[BaseFairseqModel]:
    """Copy the model with candidate output, and check that the model itself does not change."""
    parts = dict(model.named_modules(remove_duplicate=False))
    yield with_candidate_output(model, candidates)
    assert all(parts[name] is part for name, part in model.named_modules(remove_duplicate=False))


@contextmanager
def itself(model: BaseFairseqModel, candidates: Tensor) -> Iterator[BaseFairseqModel]:
    with candidate_output(model, candidates):
        yield model


@pytest.mark.parametrize("narrow", [twin, itself])
@pytest.mark.parametrize("prepared", [False, True])
def test_predictions_and_gradients(model: Model, inputs: tuple[Tensor, ...], narrow: Any, prepared: bool) -> None:
    candidates = torch.tensor(CANDIDATES, device=inputs[0].device)
    models = [model(), model()]
    if prepared:
        for each in models:
            each.make_generation_fast_()
    with narrow(models[0], candidates) as narrowed_model:
        actual = narrowed_model(*inputs)[0]
    expected = models[1](*inputs)[0][..., candidates]
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)

    mixture = torch.randn_like(expected)
    for logits in (actual, expected):
        (logits.log_softmax(dim=-1) * mixture).sum().backward()
    for (name, mine), theirs in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_restored(model: Model, inputs: tuple[Tensor, ...], fails: bool) -> None:
    """The model is restored, also after an error: an optimizer needs the same parameters in the same order."""
    whole = model()
    parameters, state = (
        dict(whole.named_parameters()),
        {name: value.clone() for name, value in whole.state_dict().items()},
    )
    expected = whole(*inputs)[0]
    try:
        with candidate_output(whole, torch.tensor(CANDIDATES, device=inputs[0].device)):
            if fails:
                raise InterruptedError
    except InterruptedError:
        pass
    assert torch.equal(whole(*inputs)[0], expected)
    assert list(whole.state_dict()) == list(state)
    after = dict(whole.named_parameters())
    assert list(after) == list(parameters)
    assert all(after[name] is parameter for name, parameter in parameters.items())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda layer: weight_norm(layer, dim=1),
        parametrizations.spectral_norm,
        spectral_norm,
        lambda layer: prune.l1_unstructured(layer, "weight", 1),
        lambda layer: parametrizations.weight_norm(layer, "bias", dim=0),
        nn.Sequential,
    ],
)
def test_other_layers_are_refused(spoil: Callable[[nn.Linear], nn.Module]) -> None:
    with pytest.raises(ValueError, match="expected a linear map"):
        selected_rows(spoil(nn.Linear(3, 5)), torch.tensor([1]))


def test_models_without_a_linear_output_layer_are_refused(task: SimpleNamespace, dictionary: Any) -> None:
    candidates = torch.tensor(CANDIDATES)
    tied = fairseq_model("lstm", task, share_decoder_input_output_embed=True)
    adaptive = fairseq_model("transformer_tiny", task, adaptive_softmax_cutoff="10,20")
    for model in (tied, adaptive):
        with pytest.raises(ValueError, match=f"^--candidates: {type(model.decoder).__name__} "):
            candidate_output(model, candidates).__enter__()
    with pytest.raises(ValueError, match=r"^--candidates: Linear "):
        candidate_output(nn.Linear(1, 1), candidates).__enter__()
    normalised = fairseq_model("transformer_tiny", task)
    spectral_norm(normalised.decoder.output_projection)
    with pytest.raises(ValueError, match="output_projection"):
        candidate_output(normalised, candidates).__enter__()
