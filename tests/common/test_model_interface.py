"""Methods that fairseq and its users call on any encoder-decoder, besides `forward`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from fairseq.modules import FairseqDropout

SOURCE, TARGET = [5, 3], [4, 2]


def test_the_embedding_of_padding_is_zero(build, architecture, dictionary) -> None:
    model = build(architecture)
    for side in (model.encoder, model.decoder):
        weight = side.embedding.words.weight
        assert weight.any(dim=1).logical_not().nonzero().tolist() == [[dictionary.pad()]]


@torch.no_grad()
def test_the_longest_sentences(build, architecture, sentences) -> None:
    """The model handles sentences of `max_positions`, in steps too; the error for one token more names both numbers."""
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


RETAIN = {
    "nothing": (False, None, lambda owner: False),
    "everything": (True, None, lambda owner: True),
    "the encoder": (True, "Encoder", lambda owner: owner.endswith("Encoder")),
}


@pytest.mark.parametrize("what", RETAIN)
def test_retained_dropout(build, architecture, sentences, what: str) -> None:
    """Prepare a model as fairseq-generate does with --retain-dropout and --retain-dropout-modules."""
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


@torch.no_grad()
def test_exporting(build, architecture, sentences) -> None:
    """A model that is prepared to translate has the same outputs and attention after `torch.export`."""
    model = build(architecture)
    model.make_generation_fast_(need_attn=True)
    program = torch.export.export(model, (sentences([4, 3]), None, sentences([3, 2])), strict=False).module()
    for seed in (1, 2):
        batch = (sentences([4, 2], seed=seed), None, sentences([3, 3], seed=seed))
        logits, extra = program(*batch)
        expected, expected_extra = model(*batch)
        torch.testing.assert_close(logits, expected)
        torch.testing.assert_close(extra["attn"], expected_extra["attn"])


def test_a_checkpoint_of_a_newer_version_is_refused(build, architecture) -> None:
    """The error names both versions; the model's own checkpoint loads."""
    model = build(architecture)
    state = model.state_dict()
    model.load_state_dict(state)
    version = int(state["version"])
    state["version"] = torch.tensor(version + 1)
    assert version == (2 if "weighted" in architecture else 1), "with another number old checkpoints are refused"
    with pytest.raises(ValueError, match=f"version {version + 1} .* {version}"):
        model.load_state_dict(state)
