"""The size of the model, and what it refuses."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY, BaseFairseqModel


def build_large(architecture: str, **options: object) -> BaseFairseqModel:
    """Without memory, with the paper's vocabulary."""
    dictionary = Dictionary()
    for index in range(32000 - len(dictionary)):
        dictionary.add_symbol(str(index))
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    args = Namespace(arch=architecture, max_source_positions=8, max_target_positions=8, **options)
    ARCH_CONFIG_REGISTRY[architecture](args)
    with torch.device("meta"):
        return ARCH_MODEL_REGISTRY[architecture].build_model(args, task)


@pytest.mark.parametrize("branch_ffn", ["split", "shared"])
def test_it_has_as_many_parameters_as_the_transformer(branch_ffn: str) -> None:
    """And the paper's 192 weights of branches."""
    ours = build_large("weighted_transformer_small", branch_ffn=branch_ffn)
    theirs = build_large("transformer", share_all_embeddings=True)
    counts = [sum(parameter.numel() for parameter in model.parameters()) for model in (ours, theirs)]
    assert counts[0] == pytest.approx(counts[1], rel=0.001)
    weights = [value for name, value in ours.named_parameters() if ".kappa." in name or ".alpha." in name]
    assert sum(value.numel() for value in weights) == 192


def test_targets_padded_on_the_left_are_refused(task: SimpleNamespace) -> None:
    args = Namespace(max_source_positions=8, max_target_positions=8)
    ARCH_CONFIG_REGISTRY["weighted_transformer_tiny"](args)
    left = SimpleNamespace(**vars(task), cfg=SimpleNamespace(left_pad_target=True))
    with pytest.raises(ValueError, match="leave out --left-pad-target"):
        ARCH_MODEL_REGISTRY["weighted_transformer_tiny"].build_model(args, left)


def test_different_dictionaries_are_named(dictionary: Dictionary) -> None:
    args = Namespace(max_source_positions=8, max_target_positions=8)
    ARCH_CONFIG_REGISTRY["weighted_transformer_tiny"](args)
    other = SimpleNamespace(source_dictionary=dictionary, target_dictionary=Dictionary())
    with pytest.raises(ValueError, match="--joined-dictionary, or use --share-embeddings decoder"):
        ARCH_MODEL_REGISTRY["weighted_transformer_tiny"].build_model(args, other)


def test_autocast(build, sentences) -> None:
    """What --amp does, here in bfloat16: parameters stay in float32, products do not."""
    model = build("weighted_transformer_tiny").train()
    with torch.autocast("cpu", torch.bfloat16):
        logits, _ = model(sentences([5, 3]).cpu(), None, sentences([4, 4]).cpu())
    assert logits.dtype == torch.bfloat16
    logits.float().square().mean().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters() if parameter.grad is not None)


@pytest.mark.parametrize("stepwise", [False, True])
@torch.no_grad()
def test_retained_dropout_reaches_attention(build, sentences, stepwise: bool) -> None:
    model = build("weighted_transformer_tiny", attention_dropout=0.5)
    model.make_generation_fast_(retain_dropout=True, retain_dropout_modules=["AttentionHeads"])
    source, target = sentences([5, 3]), sentences([4, 4])
    state = [{}, {}] if stepwise else [None, None]
    encoded = model.encoder(source)
    first, second = (model.decoder(target, encoded, incremental_state=each)[0] for each in state)
    assert not torch.equal(first, second)
    assert not model.encoder.layers[0].dropout.apply_during_inference
