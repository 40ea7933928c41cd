"""Compare random searches of all kinds of models with fairseq's, word by word: ``python -m tests.searches 10000``."""

from __future__ import annotations

import logging
import random
import sys
import warnings
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.sequence_generator import EnsembleModel, SequenceGenerator
from torch import Tensor
from tqdm import tqdm

from fairseq_plugins.search import generator
from fairseq_plugins.search.generator import FastBeamSearch
from fairseq_plugins.search.graphs import GraphCache
from fairseq_plugins.vocabulary.candidates import Candidates
from tests.conftest import ARCHITECTURES, WORDS, enliven, random_model
from tests.search.searching import FAIRSEQ_MODELS, assert_same, fairseq_model, read_copy_later

FIRST = 4  # the first index after the special symbols
PAD, EOS = 1, 2


class Reference(EnsembleModel):
    """fairseq's model wrapper, with forbidden words and a constant for each word except the end."""

    possible: Tensor
    word_penalty: float

    def forward_decoder(
        self, tokens: Tensor, encoder_outs: Any, incremental_states: Any, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor | None]:
        logits, extra = self.single_model.decoder(tokens, encoder_outs[0], incremental_state=incremental_states[0])
        attention = extra["attn"] if isinstance(extra, dict) else extra  # this plugin's or fairseq's form of attention
        attention = attention[0] if isinstance(attention, list) else attention
        logits = logits[:, -1].masked_fill(~self.possible, -torch.inf) / temperature
        lprobs = logits.log_softmax(dim=1, dtype=torch.float32)
        lprobs += self.word_penalty * (torch.arange(lprobs.size(1)) != EOS)
        return lprobs, None if attention is None else attention[:, -1]


@cache
def dictionary() -> Dictionary:
    words = Dictionary()
    for index in range(WORDS):
        words.add_symbol(f"w{index}")
    return words


@cache
def model(architecture: str, seed: int, prepared: bool) -> Any:
    """Build a model in double precision, so that searches can be compared; scores are in single precision."""
    task = SimpleNamespace(source_dictionary=dictionary(), target_dictionary=dictionary())
    if architecture in FAIRSEQ_MODELS:
        return fairseq_model(architecture, task, seed).double()
    _, made = random_model(architecture, task, seed)
    enliven(made)
    made.double().eval()
    if prepared:
        made.make_generation_fast_(need_attn=True)
    return made


@cache
def graphs() -> GraphCache:
    """Return a cache of fixed states that reuses memory between batches, as on a GPU, but captures no graphs."""
    return GraphCache(capture=lambda run: run, compile_step=lambda step: step)


def check(number: int) -> tuple[bool, int]:
    """Run the search with this number; return whether it used a compiled program, and the number of hypotheses.

    Raises AssertionError if the result differs from fairseq's.
    """
    chance = random.Random(number)
    torch.manual_seed(number)
    pick = chance.choice
    architecture = pick([*ARCHITECTURES, *ARCHITECTURES, *FAIRSEQ_MODELS])
    lengths = [chance.randint(1, 12) for _ in range(chance.randint(1, 9))]
    if architecture == "lstm":  # fairseq requires descending lengths
        lengths.sort(reverse=True)
    source = torch.full((len(lengths), max(lengths)), PAD)
    left_pad = pick([True, False])
    for row, length in zip(source, lengths, strict=True):
        words = torch.cat([torch.randint(FIRST, FIRST + WORDS, (length - 1,)), torch.tensor([EOS])])
        row[-length if left_pad else 0 : None if left_pad else length] = words
    longest = pick([0, 1, 3, 8, 20])
    options = {
        "beam_size": pick([1, 2, 3, 5, 7, 12]),
        "max_len_a": pick([0, 0, 0.5]),
        "max_len_b": longest,
        "max_len": pick([0, 0, 9]),
        "min_len": chance.randint(0, min(longest, 5)),
        "unk_penalty": pick([0, 0, 1.5, -1.5]),
        "temperature": pick([1, 1, 2]),
        "len_penalty": pick([0, 0.5, 1]),
        "normalize_scores": pick([True, True, False]),
        "tokens_to_suppress": pick([(), (), ("w7", "w8", "w30")]),
    }
    call: dict[str, Any] = {"bos_token": pick([None, None, 8])}
    if pick([True, False]):
        prefix = torch.randint(FIRST, FIRST + WORDS, (len(lengths), chance.randint(1, 4)))
        for row in prefix:
            length = chance.randint(0, len(row))
            row[length:] = PAD
            if length > 1 and pick([True, False, False]):  # fairseq crashes if a prefix is only an end symbol
                row[length - 1] = EOS
        call["prefix_tokens"] = prefix
    candidates = None
    possible = torch.ones(FIRST + WORDS, dtype=torch.bool)
    if pick([True, False]):
        always = torch.rand(FIRST + WORDS) < 0.4
        always[: FIRST + 15] = True
        candidates = Candidates(torch.randint(FIRST, FIRST + WORDS, (FIRST + WORDS, 1)), always)
        possible = candidates.mask(source)
        forced = [call.get("prefix_tokens", torch.empty(0)), torch.tensor([call["bos_token"] or EOS])]
        forced.append(torch.tensor([dictionary().index(word) for word in options["tokens_to_suppress"]]))
        possible[torch.cat([each.flatten().long() for each in forced])] = True
    prepared, runs_programs = pick([True, True, False]), pick([True, False])
    searched = model(architecture, chance.randint(0, 9), prepared and architecture not in FAIRSEQ_MODELS)
    reference = Reference([searched])
    reference.possible, reference.word_penalty = possible, pick([0.0, 0.0, 1.0, -0.7])

    sample = {"net_input": {"src_tokens": source, "src_lengths": torch.tensor(lengths)}}
    expected = SequenceGenerator(reference, dictionary(), **options).generate([], sample, **call)
    search = FastBeamSearch(
        [searched],
        dictionary(),
        candidates=candidates,
        word_penalty=reference.word_penalty,
        graphs=graphs() if runs_programs else None,
        **options,
    )
    every = pick([1, 1, 3, 4, 8])
    with torch.inference_mode(pick([True, False])), pytest.MonkeyPatch.context() as pretended:
        pretended.setattr(generator, "copy_to_host_async", read_copy_later)
        pretended.setattr(generator, "steps_between_reads", lambda device: every)
        actual = search.generate([searched], sample, **call)
    assert_same(actual, expected, tolerance=2e-5)  # sums are in single precision
    return runs_programs and prepared and architecture in ARCHITECTURES, sum(map(len, actual))


def main() -> None:
    searches = int(sys.argv[1])
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    different, by_programs, hypotheses = [], 0, 0
    for number in tqdm(range(first, first + searches)):
        try:
            by_program, found = check(number)
        except AssertionError as error:
            different.append(number)
            print(f"search {number} differs: {error}", file=sys.stderr)
        else:
            by_programs += by_program
            hypotheses += found
    print(
        f"{searches} searches, {by_programs} of them in the memory of earlier ones, {hypotheses} hypotheses: "
        f"{len(different)} differ from fairseq's {different or ''}"
    )
    sys.exit(bool(different))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
