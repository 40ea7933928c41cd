"""Models with fast forms, compared with the same models in float64, which have no fast forms."""

from __future__ import annotations

import pytest
import torch

from fairseq_plugins.cpu.packing import PackedWeightCache
from fairseq_plugins.search.generator import FastBeamSearch

# These sizes and lengths use every fast form.
SIZES = {
    "convs2s_tiny": {"encoder_layers": "[(512, 3)] * 2", "decoder_layers": "[(512, 3)] * 2"},
    "weighted_transformer_tiny": {},
    "conv_encoder_tiny": {},
}


@pytest.mark.parametrize("onednn", [False, True])
def test_losses_and_gradients(build, architecture, sentences, prefer_onednn, onednn) -> None:
    prefer_onednn(onednn)
    source, target = sentences([10] * 64), sentences([8] * 64)
    results = []
    for dtype in (torch.float64, torch.float32):
        model = build(architecture, **SIZES[architecture]).to(dtype)
        model.decoder.need_attn = False
        logits, _ = model(source, None, target)
        logits.log_softmax(dim=-1).gather(2, target.unsqueeze(2)).sum().backward()
        results.append([logits, *(part.grad for part in model.parameters() if part.grad is not None)])
    for plain, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast.double(), plain, rtol=1e-3, atol=1e-4 * float(plain.abs().max()))


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("beam", [1, 4])
def test_translations(build, architecture: str, sentences, dictionary, beam: int, prepared: bool) -> None:
    source = sentences([5, 9, 3, 20])
    sample = {"net_input": {"src_tokens": source, "src_lengths": source.ne(dictionary.pad()).sum(dim=1)}}
    found = []
    for dtype in (torch.float64, torch.float32):
        model = build(architecture, **SIZES[architecture]).to(dtype)
        if prepared:
            model.make_generation_fast_()
        search = FastBeamSearch([model], dictionary, PackedWeightCache(), beam_size=beam, max_len_b=20)
        found.append(search.generate([model], sample))
    for plain, fast in zip(*found, strict=True):
        for ours, theirs in zip(fast, plain, strict=True):
            torch.testing.assert_close(ours["score"].double(), theirs["score"].double(), rtol=1e-4, atol=1e-4)
        assert torch.equal(plain[0]["tokens"], fast[0]["tokens"])
