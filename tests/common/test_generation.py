"""Compare each of fairseq's search modes with decoding without any state."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from fairseq import search
from fairseq.models import FairseqDecoder
from fairseq.sequence_generator import SequenceGenerator
from fairseq.token_generation_constraints import pack_constraints

LENGTHS = [9, 3, 6, 1]


class WithoutState(FairseqDecoder):
    """Decode each row's whole prefix at every step, like a decoder without incremental state."""

    def __init__(self, decoder: FairseqDecoder) -> None:
        super().__init__(decoder.dictionary)
        self.decoder = decoder

    def forward(self, prev_output_tokens: torch.Tensor, encoder_out: Any, **_: Any) -> Any:
        return self.decoder(prev_output_tokens, encoder_out)

    def max_positions(self) -> int:
        return self.decoder.max_positions()


def without_state(model: Any) -> Any:
    model.decoder = WithoutState(model.decoder)
    return model


def generate(
    models: list[Any], dictionary: Any, source: torch.Tensor, *, kind: type = SequenceGenerator, **options: Any
) -> Any:
    """Translate with a generator of this kind; prefixes, constraints and the first token are passed to the call."""
    sample = {"net_input": {"src_tokens": source, "src_lengths": source.ne(dictionary.pad()).sum(dim=1)}}
    call = {name: options.pop(name) for name in ("prefix_tokens", "constraints", "bos_token") if name in options}
    call = {name: value.to(source.device) if torch.is_tensor(value) else value for name, value in call.items()}
    strategy = options.pop("search", None)
    options["search_strategy"] = strategy(dictionary) if strategy else None
    generator = kind(models, dictionary, **{"beam_size": 4, "max_len_b": 12, **options})
    torch.manual_seed(3)
    return generator.generate(models, sample, **call)


def assert_same(actual: Any, expected: Any) -> None:
    assert [[beam["tokens"].tolist() for beam in beams] for beams in actual] == [
        [beam["tokens"].tolist() for beam in beams] for beams in expected
    ]
    for mine, theirs in zip(chain(*actual), chain(*expected), strict=True):
        torch.testing.assert_close(mine["positional_scores"], theirs["positional_scores"], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mine["attention"], theirs["attention"], rtol=1e-4, atol=1e-4)


MODES: dict[str, dict[str, Any]] = {
    "beam": {},
    "greedy": {"beam_size": 1},
    "wide beam": {"beam_size": 9},
    "short": {"max_len_b": 2},
    "length from the source": {"max_len_a": 0.5, "max_len_b": 1},
    "minimum length": {"min_len": 5},
    "no repetition": {"no_repeat_ngram_size": 2},
    "diverse beam": {"search": lambda d: search.DiverseBeamSearch(d, num_groups=2, diversity_strength=0.5)},
    "diverse siblings": {"search": lambda d: search.DiverseSiblingsSearch(d, diversity_rate=0.5)},
    "sampling": {"search": search.Sampling},
    "top-k sampling": {"search": lambda d: search.Sampling(d, sampling_topk=5)},
    "top-p sampling": {"search": lambda d: search.Sampling(d, sampling_topp=0.8)},
    "prefix": {"prefix_tokens": torch.tensor([[7, 8, 9], [10, 1, 1], [11, 12, 1], [1, 1, 1]])},
    "constraints": {
        "search": lambda d: search.LexicallyConstrainedBeamSearch(d, "unordered"),
        "constraints": pack_constraints([[torch.tensor([7, 8])], [torch.tensor([9])], [], [torch.tensor([10])]]),
    },
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("left_pad", [False, True])
@torch.no_grad()
def test_modes(build, architecture, sentences, dictionary, device, mode: str, left_pad: bool) -> None:
    source = sentences(LENGTHS, left_pad)
    options = {name: value.to(device) if torch.is_tensor(value) else value for name, value in MODES[mode].items()}
    actual = generate([build(architecture)], dictionary, source, **options)
    assert_same(actual, generate([without_state(build(architecture))], dictionary, source, **options))
