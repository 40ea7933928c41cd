"""`torch.export` exports all models."""

from __future__ import annotations

import torch


@torch.no_grad()
def test_exporting(build, architecture, sentences) -> None:
    """A model that is prepared to translate has the same outputs and attention after `torch.export`."""
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
