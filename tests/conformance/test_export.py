"""fairseq's test_export asks for TorchScript; here it is refused with a reason, and `torch.export` takes the models."""

from __future__ import annotations

from functools import partial

import pytest
import torch


def test_torchscript_is_refused(build, architecture, sentences) -> None:
    """Scripts and traces of the model and of each half, and fairseq's preparation for ONNX."""
    model, source, target = build(architecture), sentences([4, 3]), sentences([3, 2])
    encoded = model.encoder(source)
    attempts = [partial(torch.jit.script, part) for part in (model, model.encoder, model.decoder)]
    attempts += [
        lambda: torch.jit.trace(lambda src, tgt: model(src, None, tgt)[0], (source, target)),
        lambda: torch.jit.trace(model.encoder, (source,)),
        lambda: torch.jit.trace(lambda tokens: model.decoder(tokens, encoded)[0], (target,)),
        model.prepare_for_onnx_export_,
    ]
    for attempt in attempts:
        with pytest.raises(NotImplementedError, match=r"torch\.export\.export"):
            attempt()


@torch.no_grad()
def test_exporting(build, architecture, sentences) -> None:
    """`torch.export` of a model that is prepared to translate computes what the model does, attention included."""
    model = build(architecture)
    model.make_generation_fast_(need_attn=True)
    example = (sentences([4, 3]), None, sentences([3, 2]))
    program = torch.export.export(model, example, strict=False).module()
    for seed in (1, 2):
        batch = (sentences([4, 2], seed=seed), None, sentences([3, 3], seed=seed))
        logits, extra = program(*batch)
        expected, expected_extra = model(*batch)
        torch.testing.assert_close(logits, expected)
        torch.testing.assert_close(extra["attn"], expected_extra["attn"])
