"""What fairseq and its users call on any encoder-decoder, beside `forward`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from fairseq.modules import FairseqDropout

SOURCE, TARGET = [5, 3], [4, 2]


@torch.no_grad()
def test_features_and_output_layer_are_forward(build, architecture, sentences) -> None:
    model = build(architecture)
    batch = (sentences(SOURCE), None, sentences(TARGET))
    features, _ = model.extract_features(*batch)
    torch.testing.assert_close(model.output_layer(features), model(*batch)[0])


def test_padding_is_embedded_as_nothing(build, architecture, dictionary) -> None:
    model = build(architecture)
    for side in (model.encoder, model.decoder):
        weight = side.embedding.words.weight
        assert weight.any(dim=1).logical_not().nonzero().tolist() == [[dictionary.pad()]]


@pytest.mark.parametrize("log_probs", [False, True])
@torch.no_grad()
def test_normalised_probabilities(build, architecture, sentences, log_probs: bool) -> None:
    model = build(architecture)
    output = model(sentences(SOURCE), None, sentences(TARGET))
    found = model.get_normalized_probs(output, log_probs)
    expected = output[0].double().softmax(dim=-1)
    torch.testing.assert_close(found.double(), expected.log() if log_probs else expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_the_longest_sentences(build, architecture, sentences) -> None:
    """`max_positions` is what still works, in steps too, and one token more is refused by number."""
    model = build(architecture, max_source_positions=12, max_target_positions=9)
    assert model.max_positions() == (12, 9)
    assert model.max_decoder_positions() == 9
    model(sentences([12]), None, sentences([9]))
    model.decoder(sentences([9]), model.encoder(sentences([12])), incremental_state={})
    if model.encoder.embedding.positional:
        with pytest.raises(ValueError, match=r"13 tokens .* 12 positions"):
            model(sentences([13]), None, sentences([9]))
    if model.decoder.embedding.positional:
        with pytest.raises(ValueError, match=r"10 tokens .* 9 positions"):
            model(sentences([12]), None, sentences([10]))
        with pytest.raises(ValueError, match=r"10 tokens .* 9 positions"):
            model.decoder(sentences([10]), model.encoder(sentences([12])), incremental_state={})


@torch.no_grad()
def test_states_are_apart(build, architecture, sentences) -> None:
    """Two batches decoded in turns, each with its own state, are two batches decoded one after the other."""
    model = build(architecture)
    batches = [(sentences([5, 3]), sentences([6, 6])), (sentences([2, 7, 4], seed=2), sentences([6] * 3, seed=2))]
    encoded = [model.encoder(source) for source, _ in batches]
    states: list[dict] = [{}, {}]
    found: list[list[torch.Tensor]] = [[], []]
    for step in range(1, 7):
        for number, (_, target) in enumerate(batches):
            logits, _ = model.decoder(target[:, :step], encoded[number], incremental_state=states[number])
            found[number].append(logits)
    for number, (_, target) in enumerate(batches):
        expected, _ = model.decoder(target, encoded[number])
        torch.testing.assert_close(torch.cat(found[number], dim=1), expected, rtol=1e-4, atol=1e-4)


RETAIN = {
    "nothing": (False, None, lambda owner: False),
    "everything": (True, None, lambda owner: True),
    "the encoder": (True, "Encoder", lambda owner: owner.endswith("Encoder")),
}


@pytest.mark.parametrize("what", RETAIN)
def test_retained_dropout(build, architecture, sentences, what: str) -> None:
    """--retain-dropout and --retain-dropout-modules, as fairseq-generate prepares a model with them."""
    retain, suffix, retained = RETAIN[what]
    model = build(architecture, dropout=0.3)
    names = suffix and [type(model.encoder).__name__]
    generation = {"retain_dropout": retain, "retain_dropout_modules": names, "print_alignment": None}
    generation |= {"no_beamable_mm": True, "beam": 5}
    model.prepare_for_inference_(SimpleNamespace(generation=SimpleNamespace(**generation)))
    modules = [module for module in model.modules() if isinstance(module, FairseqDropout) and module.p > 0]
    assert modules
    for module in modules:
        assert module.apply_during_inference == retained(module.module_name)
    batch = (sentences(SOURCE), None, sentences(TARGET))
    with torch.no_grad():
        assert torch.equal(model(*batch)[0], model(*batch)[0]) == (not retain)
