"""Models that are loaded to translate: parameters, positions, long sentences, blocked n-grams."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY, BaseFairseqModel
from fairseq.ngram_repeat_block import NGramRepeatBlock
from omegaconf import OmegaConf
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_plugins.repairs.translating import remove_words
from tests.commands import QUIET, USER_DIR, run
from tests.conftest import ARCHITECTURES

MODELS = [(each, {}) for each in ARCHITECTURES]
MODELS += [("conv_encoder_tiny", {"encoder_type": each}) for each in ("lstm", "pooling")]


class Draws(TorchDispatchMode):
    """Count the random numbers that are drawn within the context."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(func) for name in ("normal", "uniform", "rand", "exponential", "bernoulli")):
            self.numbers += args[0].numel()
        return func(*args, **(kwargs or {}))


def build(architecture: str, task: SimpleNamespace, **options: Any) -> BaseFairseqModel:
    args = Namespace(arch=architecture, max_source_positions=64, max_target_positions=64, **options)
    ARCH_CONFIG_REGISTRY[architecture](args)
    return ARCH_MODEL_REGISTRY[architecture].build_model(args, task)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("architecture", "options"), [*MODELS, ("transformer_tiny", {})])
def test_a_loaded_model_draws_no_numbers(
    task: SimpleNamespace, architecture: str, options: dict[str, Any], strict: bool
) -> None:
    """fairseq's own models draw random numbers, and so do ours if the checkpoint may lack parameters."""
    trained = build(architecture, task, **options)
    state = {"cfg": OmegaConf.create({"model": {"_name": architecture}, "task": {}}), "model": trained.state_dict()}
    loader = SimpleNamespace(build_model=lambda cfg: build(architecture, task, **options))
    with Draws() as draws:
        (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([__file__], None, loader, strict, state=state)
    size = sum(parameter.numel() for parameter in trained.parameters())
    ours = architecture != "transformer_tiny"
    assert (draws.numbers < 0.01 * size) == (ours and strict)
    for (name, actual), expected in zip(model.state_dict().items(), trained.state_dict().values(), strict=True):
        # fairseq 0.12.2's Transformer does not load copies for torch's fused layer, nor an uninitialised buffer.
        if ours or not re.fullmatch(r"encoder\.layers\.\d+\.\w+|.+\._float_tensor", name):
            assert torch.equal(actual, expected), name


def test_repeated_ngrams_are_blocked_in_the_generators_buffer() -> None:
    """A padded buffer gives the same result as tokens without padding; fairseq's function looks at the padding."""
    block, tokens = NGramRepeatBlock(3, use_extension=False), torch.tensor([[2, 5, 6, 7, 5, 6], [2, 5, 6, 7, 6, 5]])
    buffer = torch.cat([tokens, torch.ones(2, 4, dtype=torch.long)], dim=1)
    alone, inside = (block(given, torch.zeros(2, 9), bsz=1, beam_size=2, step=5) for given in (tokens, buffer))
    assert torch.equal(inside, alone)
    assert (inside == float("-inf")).nonzero().tolist() == [[0, 7]]  # the trigram 5 6 7 would be repeated


def test_removed_words_leave_the_attention_of_one_word() -> None:
    hypothesis = {"tokens": torch.tensor([5, 6, 2]), "positional_scores": torch.ones(3), "attention": torch.ones(4, 3)}
    remove_words(hypothesis, eos=2)
    assert [hypothesis[name].shape for name in ("tokens", "positional_scores", "attention")] == [(1,), (1,), (4, 1)]


def test_sentences_beyond_a_batch_are_skipped(data: Path, tmp_path: Path) -> None:
    """Training, validation and translation skip sentences that exceed a batch, like other long sentences."""
    options = [data, "--user-dir", USER_DIR, "--max-tokens", 6, "--skip-invalid-size-inputs-valid-test"]
    training = ["--arch", "convs2s_tiny", "--optimizer", "adam", "--max-update", 1, "--save-dir", tmp_path, *QUIET]
    result = run("train", *options, *training)
    skipped = "samples have invalid sizes and will be skipped, max_positions=(6, 6)"
    assert skipped in result.stdout + result.stderr
    lengths = [len(line.split()) for line in (data.parent / "test.src").read_text().splitlines()]
    assert max(lengths) > 5
    options += ["--path", tmp_path / "checkpoint_last.pt"]
    result = run("generate", *options, "--max-len-b", 2)
    assert result.stdout.count("\nH-") == sum(length <= 5 for length in lengths)
    result = run("validate", *options, "--task", "translation")
    assert skipped in result.stdout + result.stderr
