"""Models of fairseq's own, modes of search, the search itself, and comparison of hypotheses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from fairseq import search
from fairseq.models import BaseFairseqModel
from fairseq.token_generation_constraints import pack_constraints
from torch import Tensor

from fairseq_plugins.search.generator import copy_to_host_async
from tests.common import test_generation
from tests.conftest import EOS, random_model

FAIRSEQ_MODELS = ["fconv", "transformer_tiny", "lstm"]
_SIZES: dict[str, dict[str, Any]] = {
    "fconv": {
        "encoder_embed_dim": 12,
        "decoder_embed_dim": 12,
        "decoder_out_embed_dim": 12,
        "encoder_layers": "[(16, 3)] * 2",
        "decoder_layers": "[(16, 3)] * 2",
    },
    "transformer_tiny": {},
    "lstm": {
        "encoder_embed_dim": 12,
        "encoder_hidden_size": 12,
        "decoder_embed_dim": 32,
        "decoder_out_embed_dim": 32,
        "criterion": "cross_entropy",
    },
}


def fairseq_model(architecture: str, task: SimpleNamespace, seed: int = 1, **options: Any) -> BaseFairseqModel:
    """Build a random model in evaluation mode, with nonuniform predictions and with sentences that end."""
    _, model = random_model(architecture, task, seed, **{**_SIZES[architecture], **options})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed" in name:
                parameter.mul_(5)
            elif architecture == "lstm" and "weight" in name:
                parameter.mul_(10)  # otherwise an LSTM repeats a word, and many hypotheses have equal scores
            if name.endswith(("fc3.bias", "fc_out.bias")):
                parameter.normal_()
                parameter[EOS] += 1
    return model.eval()


LENGTHS = [9, 6, 3, 1]  # fairseq's lstm needs descending lengths
PREFIX = torch.tensor([[7, 8, 9], [10, 1, 1], [12, 2, 1], [1, 1, 1]])  # the third prefix is a whole sentence
OTHER_MODES = {
    "prefix with an end": {"prefix_tokens": PREFIX},
    "prefix longer than outputs": {"prefix_tokens": PREFIX, "max_len_b": 1, "min_len": 0},
    "prefix, and rules behind it": {"prefix_tokens": PREFIX[:, :2], "min_len": 5, "tokens_to_suppress": ("w7", "w8")},
    "prefix behind another first word": {"prefix_tokens": PREFIX, "bos_token": 8},
    "no words": {"max_len_a": 0, "max_len_b": 0, "min_len": 0},
    "no least length": {"min_len": -2},
    "suppressed words": {"tokens_to_suppress": ("w7", "w8", "w30"), "normalize_scores": False},
    "another first word": {"bos_token": 8},
    "as long as positions allow": {"max_len": 7, "min_len": 6},
    "penalty on unknown words": {"unk_penalty": 2, "len_penalty": 0.5, "temperature": 2},
    "many ordered constraints": {
        "constraints": pack_constraints(
            [[torch.tensor([word]) for word in (7, 12, 8, 9, 10)], [], [torch.tensor([6])], []]
        ),
        "search": lambda d: search.LexicallyConstrainedBeamSearch(d, "ordered"),
    },
    "as long as the source": {
        "match_source_len": True,
        "search": lambda d: search.LengthConstrainedBeamSearch(d, min_len_a=1, min_len_b=0, max_len_a=1, max_len_b=0),
    },
}
MODES = {**test_generation.MODES, **OTHER_MODES}
Model = Callable[..., BaseFairseqModel]


def read_copy_later(numbers: Tensor) -> Callable[[], Any]:
    """Copy numbers now, to be read later, like numbers of a GPU."""
    return copy_to_host_async(numbers.clone())


def generate(kind: type, *given: Any, **options: Any) -> Any:
    return test_generation.generate(*given, kind=kind, **options)


def assert_same(actual: Any, expected: Any, tolerance: float) -> None:
    """Compare hypotheses; if a prefix ends a sentence, fairseq's copies may have another row's attention."""
    assert [[beam["tokens"].tolist() for beam in beams] for beams in actual] == [
        [beam["tokens"].tolist() for beam in beams] for beams in expected
    ]
    close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    for mine, theirs in zip(chain(*actual), chain(*expected), strict=True):
        for name in ("score", "positional_scores", "alignment"):
            close(mine[name], theirs[name])
        (beams,) = (beams for beams in expected if any(each is theirs for each in beams))
        copies = [each["attention"] for each in beams if each["tokens"].tolist() == mine["tokens"].tolist()]
        if not any(torch.allclose(mine["attention"], each, rtol=tolerance, atol=tolerance) for each in copies):
            close(mine["attention"], theirs["attention"])
