"""fairseq's test_export asks for TorchScript; here it is refused with a reason, and `torch.export` takes the models."""

from __future__ import annotations

import pytest
import torch

REFUSED = r"cannot become TorchScript, nor ONNX by way of it: use torch\.export\.export"


def test_scripting_is_refused(build, architecture) -> None:
    """The model, and each half of it alone; torch's own error is about a line of fairseq's."""
    model = build(architecture)
    for part in (model, model.encoder, model.decoder):
        with pytest.raises(NotImplementedError, match=REFUSED):
            torch.jit.script(part)


def test_tracing_is_refused(build, architecture, sentences) -> None:
    model = build(architecture)
    source, target = sentences([4, 3]), sentences([3, 2])

    def forward(src_tokens: torch.Tensor, prev_output_tokens: torch.Tensor) -> torch.Tensor:
        return model(src_tokens, None, prev_output_tokens)[0]

    with pytest.raises(NotImplementedError, match=REFUSED):
        torch.jit.trace(forward, (source, target))
    with pytest.raises(NotImplementedError, match=REFUSED):
        torch.jit.trace(model.encoder, (source,))
    encoded = model.encoder(source)
    with pytest.raises(NotImplementedError, match=REFUSED):
        torch.jit.trace(lambda tokens: model.decoder(tokens, encoded)[0], (target,))


def test_fairseqs_preparation_for_onnx_is_refused(build, architecture) -> None:
    with pytest.raises(NotImplementedError, match=REFUSED):
        build(architecture).prepare_for_onnx_export_()


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
