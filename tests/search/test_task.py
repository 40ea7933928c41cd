"""Generators and candidates of the task translation_fast."""

from __future__ import annotations

import math
import shutil
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq import utils
from fairseq.data import Dictionary
from fairseq.sequence_generator import SequenceGenerator, SequenceGeneratorWithAlignment
from fairseq.sequence_scorer import SequenceScorer
from fairseq.tasks.translation import TranslationTask

from fairseq_plugins.search.generator import FastBeamSearch, FastBeamSearchWithAlignment
from fairseq_plugins.search.task import TranslationFastConfig, TranslationFastTask
from tests.conftest import ARCHITECTURES


class Own(SequenceGenerator):
    """A generator class given by the caller."""


@pytest.mark.parametrize(
    ("with_candidates", "args", "kwargs", "kind"),
    [
        (True, {}, {}, FastBeamSearch),
        (True, {"print_alignment": "soft"}, {}, FastBeamSearchWithAlignment),
        (True, {"score_reference": True}, {}, SequenceScorer),
        (True, {}, {"seq_gen_cls": Own}, Own),
        (False, {}, {}, FastBeamSearch),
        (False, {"print_alignment": "hard"}, {}, FastBeamSearchWithAlignment),
    ],
)
def test_generator_of_the_task(build, dictionary, some, with_candidates, args, kwargs, kind) -> None:
    task = TranslationFastTask(TranslationFastConfig(word_penalty=0.25), dictionary, dictionary)
    task.candidates = some if with_candidates else None
    models, extra = [build(ARCHITECTURES[0])], {"lm_model": None, "lm_weight": 0.5}
    generator = task.build_generator(models, Namespace(beam=3, **args), extra_gen_cls_kwargs=extra, **kwargs)
    assert type(generator) is kind
    assert extra == {"lm_model": None, "lm_weight": 0.5}
    if isinstance(generator, FastBeamSearch):
        assert (generator.beam_size, generator.model.word_penalty, generator.lm_weight) == (3, 0.25, 0.5)
        assert generator.graphs is None
        assert generator.candidates is task.candidates
    if isinstance(generator, SequenceGeneratorWithAlignment):
        chosen = {"hard": utils.extract_hard_alignment, "soft": utils.extract_soft_alignment}
        assert generator.extract_alignment is chosen[args["print_alignment"]]


def test_generators_of_a_task_share_caches(build, dictionary, caplog) -> None:
    """fairseq's Python interface builds a generator for each call."""
    task = TranslationFastTask(TranslationFastConfig(compile_steps=True), dictionary, dictionary)
    model = build(ARCHITECTURES[0])
    one, other = (task.build_generator([model], Namespace(beam=3)) for _ in range(2))
    assert one.weight_cache is other.weight_cache
    assert one.graphs is other.graphs is not None
    assert "--compile-steps" not in caplog.text
    task.build_generator([model, model], Namespace(beam=3))
    assert "--compile-steps" in caplog.text


def test_a_nucleus_of_penalised_words_is_refused(build, dictionary) -> None:
    """Penalised probabilities do not sum to one, so the nucleus would contain other words."""
    task = TranslationFastTask(TranslationFastConfig(word_penalty=-4), dictionary, dictionary)
    models = [build(ARCHITECTURES[0])]
    with pytest.raises(ValueError, match=r"^--word-penalty with --sampling-topp"):
        task.build_generator(models, Namespace(beam=1, sampling=True, sampling_topp=0.5))
    task.build_generator(models, Namespace(beam=1, sampling=True, sampling_topk=5))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "lexicon"
    made.mkdir()
    (made / "candidates.txt").write_text("w1 w11 1\nw1 w12 0.5\nw1 w13 0.2\nw2 w21 1\n")
    (made / "frequent.txt").write_text("w5 9\nw6 8\nw7 7\n")
    return made


def task_with(dictionary: Dictionary, folder: Path, **options: Any) -> TranslationFastTask:
    config = TranslationFastConfig(candidates=str(folder), candidates_per_word=2, frequent_candidates=1)
    return TranslationFastTask(replace(config, **options), dictionary, dictionary)


def words(task: TranslationFastTask, dictionary: Dictionary) -> list[str]:
    """Return the candidates, without special symbols, of a batch with the source word w1."""
    mask = task.candidates.mask(torch.tensor([[dictionary.index("w1"), dictionary.eos()]]))
    return [dictionary[index] for index in mask.nonzero().flatten().tolist()[dictionary.nspecial :]]


def test_candidates_in_checkpoints(dictionary, folder: Path) -> None:
    """If the folder is missing, the checkpoint's candidates are used, with the same options."""
    task = task_with(dictionary, folder)
    assert words(task, dictionary) == ["w5", "w11", "w12"]
    task.state.add_factory("more", lambda: [7])
    assert task.state.more == [7]
    state = task.state_dict()
    assert set(state) == {"more", "candidates"}
    shutil.rmtree(folder)

    for _ in range(2):  # candidates from a checkpoint are saved to the next checkpoint
        alone = task_with(dictionary, folder)
        alone.load_state_dict(state)
        assert set(state) == {"more", "candidates"}
        assert words(alone, dictionary) == ["w5", "w11", "w12"]
        assert alone.state.more == [7]
        state = alone.state_dict()

    for other in ({"candidates_per_word": 1}, {"frequent_candidates": 0}, {"candidates": str(folder / "other")}):
        alone = task_with(dictionary, folder, **other)
        alone.load_state_dict(state)
        assert alone.state_dict() == {"more": [7]}
        with pytest.raises(ValueError, match=r"frequent\.txt"):
            alone.candidates  # noqa: B018  (reads them)


@pytest.mark.parametrize(
    "change",
    [
        {"always": torch.ones(7, dtype=torch.bool)},
        {"always": None},
        {"always": torch.zeros(44, dtype=torch.bool)},
        {"translations": torch.zeros(44, dtype=torch.int32)},
        {"translations": torch.zeros(43, 1, dtype=torch.int32)},
        {"translations": torch.full((44, 1), 44, dtype=torch.int32)},
        {"translations": [[4]]},
        3,
        ["options"],
    ],
    ids=str,
)
def test_malformed_candidates_in_checkpoints(dictionary, folder: Path, change: object) -> None:
    """A table of the wrong size would lose words or fail inside torch."""
    state = task_with(dictionary, folder).state_dict()
    state["candidates"] = {**state["candidates"], **change} if isinstance(change, dict) else change
    shutil.rmtree(folder)
    with pytest.raises(ValueError, match=r"^--candidates"):
        task_with(dictionary, folder).load_state_dict(state)


def test_candidates_of_the_folder_come_first(dictionary, folder: Path) -> None:
    state = task_with(dictionary, folder).state_dict()
    (folder / "frequent.txt").write_text("w8 9\n")
    task = task_with(dictionary, folder)
    task.load_state_dict(state)
    assert words(task, dictionary) == ["w8", "w11", "w12"]


def test_a_state_without_candidates(dictionary, folder: Path) -> None:
    """fairseq's own task saves states without candidates."""
    (folder / "frequent.txt").rename(folder.parent / "frequent.txt")
    folder.rename(folder.parent / "moved")
    task = task_with(dictionary, folder)
    task.load_state_dict(TranslationTask(task.cfg, dictionary, dictionary).state_dict())
    with pytest.raises(ValueError, match=r"frequent\.txt"):
        task.candidates  # noqa: B018  (reads them)


def test_options_that_a_task_refuses_at_the_start(dictionary, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"^--word-penalty"):
        task_with(dictionary, folder, word_penalty=math.inf).build_generator([], Namespace())
    (folder / "candidates.txt").write_text("w1 w11\n")
    with pytest.raises(ValueError, match=r"candidates\.txt, line 1"):
        task_with(dictionary, folder)
    assert task_with(dictionary, folder.parent / "none").cfg.candidates.endswith("none")
