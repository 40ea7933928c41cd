"""fairseq's searches: diverse beams, and options that are for other searches."""

from __future__ import annotations

import copy
import functools
import itertools
import re
from argparse import Namespace
from collections import Counter
from pathlib import Path

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.models import FairseqIncrementalDecoder, FairseqLanguageModel
from fairseq.search import DiverseBeamSearch
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from torch import Tensor

from fairseq_plugins.repairs import interactive, searches
from fairseq_plugins.search.generator import FastBeamSearch
from tests.commands import USER_DIR, run
from tests.conftest import ARCHITECTURES

BeamState = list[tuple[float, int, int]]

# fairseq 0.12.2 has an earlier form, which counts nothing and needs no repair.
COUNTS = hasattr(DiverseBeamSearch(Dictionary(), 1, 1.0), "group_overlap")


def diverse_step(lprobs: Tensor, totals: Tensor | None, groups: int, strength: float, shared: Counter) -> BeamState:
    """A step of one sentence: score, word and parent of each of its beams, as fairseq's documentation describes it.

    Args:
        lprobs: (k, V).
        totals: scores so far, (k,), or None in the first step.
        groups: into which beams are dealt in turns.
        strength: of the penalty.
        shared: how many words two groups have had in common; counted on.
    """
    found: dict[int, BeamState] = {}
    for group in range(groups):
        beams = range(group, len(lprobs), groups)
        scored: BeamState = []
        for beam in beams if totals is not None else beams[:1]:
            for word, lprob in enumerate(lprobs[beam].tolist()):
                penalty = sum(
                    strength * (1 + shared[group, other])
                    for other in range(group)
                    for _, taken, _ in found[other]
                    if taken == word
                )
                scored.append((lprob - penalty + (0 if totals is None else float(totals[beam])), word, beam))
        found[group] = sorted(scored, reverse=True)[: len(beams)]
    for group, other in itertools.permutations(range(groups), 2):
        pairs = zip(found[group], found[other], strict=True)
        shared[group, other] += sum(mine[1] == theirs[1] for mine, theirs in pairs)
    return [beam for rank in zip(*found.values(), strict=True) for beam in rank]


@pytest.mark.skipif(not COUNTS, reason="this fairseq's groups do not count what they have in common")
def test_diverse_search_is_its_plain_form() -> None:
    """Sentences of any numbers in the data, one of which ends before the others."""
    torch.manual_seed(1)
    groups, beam, words, strength = 3, 6, 7, 0.3
    search = DiverseBeamSearch(Dictionary(), groups, strength)
    sentences, scores = torch.tensor([40, 2, 11, 0]), torch.zeros(4, beam, 0)
    shared = {sentence: Counter() for sentence in sentences.tolist()}
    for step in range(5):
        alike = 2 * torch.randn(len(sentences), 1, words)
        lprobs = (alike + 0.3 * torch.randn(len(sentences), beam, words)).log_softmax(dim=2)
        found = search.step(step, lprobs, scores, torch.zeros(len(sentences) * beam, step + 1), sentences)
        for place, sentence in enumerate(sentences.tolist()):
            totals = scores[place, :, -1] if step else None
            wanted = diverse_step(lprobs[place], totals, groups, strength, shared[sentence])
            for mine, theirs in zip(found, zip(*wanted, strict=True), strict=True):
                assert mine[place].tolist() == pytest.approx(theirs, abs=1e-5)
        scores = torch.cat([scores, found[0].unsqueeze(2)], dim=2)
        if step == 1:
            sentences, scores = sentences[[0, 2, 3]], scores[[0, 2, 3]]
    assert any(count > 1 for each in shared.values() for count in each.values())


@pytest.mark.parametrize("kind", [SequenceGenerator, FastBeamSearch])
def test_sentences_together_find_what_each_finds_alone(kind, architecture: str, build, sentences, dictionary) -> None:
    model = build(architecture)
    source = sentences([3, 9, 6], left_pad=True)

    def generate(rows: Tensor, **numbers: Tensor) -> list[list[list[int]]]:
        search = DiverseBeamSearch(dictionary, 2, 0.5)
        generator = kind([model], dictionary, beam_size=4, max_len_b=8, search_strategy=search)
        lengths = rows.ne(dictionary.pad()).sum(dim=1)
        found = generator.generate([model], {"net_input": {"src_tokens": rows, "src_lengths": lengths}, **numbers})
        return [[hypo["tokens"].tolist() for hypo in beams] for beams in found]

    eos = dictionary.eos()
    together = generate(source, id=torch.tensor([7, 30, 1], device=source.device))
    assert together == [generate(row[row.ne(dictionary.pad())].unsqueeze(0))[0] for row in source]
    assert len({tuple(map(tuple, beams)) for beams in together}) > 1
    assert all(tokens.index(eos) == len(tokens) - 1 for beams in together for tokens in beams)
    assert not COUNTS or len({len(tokens) for beams in together for tokens in beams}) > 1


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model after one update."""
    folder = tmp_path_factory.mktemp("searches")
    options = ["--arch", ARCHITECTURES[0], "--max-update", 1, "--batch-size", 16, "--num-workers", 0]
    run("train", data, "--user-dir", USER_DIR, *options, "--optimizer", "adam", "--save-dir", folder)
    return folder / "checkpoint_last.pt"


def test_fairseq_generate_searches_diverse_beams(data: Path, trained: Path) -> None:
    options = ["--beam", 4, "--nbest", 4, "--diverse-beam-groups", 2, "--max-len-b", 6, "--batch-size", 4]
    output = run("generate", data, "--user-dir", USER_DIR, "--path", trained, *options).stdout
    assert len(re.findall(r"^H-", output, flags=re.MULTILINE)) == 4 * 16


def test_constraints_of_no_sentence_are_refused(data: Path, trained: Path) -> None:
    options = ["--path", trained, "--task", "translation_fast", "--constraints"]
    error = run("generate", data, "--user-dir", USER_DIR, *options, succeeds=False).stderr
    assert "--constraints: these sentences have none; fairseq-interactive reads them behind each line" in error


def test_interactive_refuses_soft_alignments_at_once(data: Path, trained: Path) -> None:
    """Before it reads a line, or the model."""
    options = ["--user-dir", USER_DIR, "--path", trained.parent / "none.pt", "--print-alignment", "soft"]
    errors = run("interactive", data, *options, succeeds=False).stderr
    assert "ValueError: --print-alignment soft: fairseq-generate" in errors


def test_a_language_model_of_other_words_is_refused(build, dictionary: Dictionary) -> None:
    """As many of them in another order score nonsense."""
    other = Dictionary()
    for word in reversed(dictionary.symbols[dictionary.nspecial :]):
        other.add_symbol(word)
    same, mixed = (FairseqLanguageModel(FairseqIncrementalDecoder(words)) for words in (copy.copy(dictionary), other))
    translation = TranslationTask(TranslationConfig(), dictionary, dictionary)
    make = functools.partial(translation.build_generator, [build(ARCHITECTURES[0])], Namespace())
    assert make(extra_gen_cls_kwargs={"lm_model": same}).lm_model is same
    with pytest.raises(ValueError, match=r"--lm-path: the language model \(dict.txt\) has other words"):
        make(extra_gen_cls_kwargs={"lm_model": mixed})


def test_what_is_repaired() -> None:
    assert not searches.takes_numbers_of_the_data_for_places(DiverseBeamSearch(Dictionary(), 2, 0.5))
    assert not interactive.prints_pairs_only(lambda cfg: cfg == "soft")
