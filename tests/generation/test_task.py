"""The generators of the task translation_fast."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
from fairseq import utils
from fairseq.sequence_generator import SequenceGenerator, SequenceGeneratorWithAlignment
from fairseq.sequence_scorer import SequenceScorer

from fairseq_plugins.generation.beam_search import FastBeamSearch, FastBeamSearchWithAlignment
from fairseq_plugins.generation.config import TranslationFastConfig
from fairseq_plugins.generation.search import CandidateSearch, CandidateSearchWithAlignment
from fairseq_plugins.generation.task import TranslationFastTask
from tests.conftest import ARCHITECTURES


class Own(SequenceGenerator):
    """A caller's generator."""


@pytest.mark.parametrize(
    ("with_candidates", "args", "kwargs", "kind"),
    [
        (True, {}, {}, CandidateSearch),
        (True, {"print_alignment": "soft"}, {}, CandidateSearchWithAlignment),
        (True, {"score_reference": True}, {}, SequenceScorer),
        (True, {}, {"seq_gen_cls": Own}, Own),
        (False, {}, {}, FastBeamSearch),
        (False, {"print_alignment": "hard"}, {}, FastBeamSearchWithAlignment),
    ],
)
def test_generator_of_the_task(
    build, dictionary, some, with_candidates: bool, args: Any, kwargs: Any, kind: type
) -> None:
    task = TranslationFastTask(TranslationFastConfig(word_penalty=0.25), dictionary, dictionary)
    assert task.candidates is None
    if with_candidates:
        task.candidates = some
    extra = {"lm_model": None, "lm_weight": 0.5}
    generator = task.build_generator(
        [build(ARCHITECTURES[0])], Namespace(beam=3, **args), extra_gen_cls_kwargs=extra, **kwargs
    )
    assert type(generator) is kind
    assert extra == {"lm_model": None, "lm_weight": 0.5}
    if kind is not SequenceScorer:
        assert generator.beam_size == 3
    if isinstance(generator, FastBeamSearch):
        assert generator.model.word_penalty == 0.25
    if isinstance(generator, CandidateSearch):
        assert generator.candidates is some
    if isinstance(generator, SequenceGeneratorWithAlignment):
        chosen = {"hard": utils.extract_hard_alignment, "soft": utils.extract_soft_alignment}
        assert generator.extract_alignment is chosen[args["print_alignment"]]


def test_generators_of_a_task_share_what_takes_long_to_make(build, dictionary, caplog) -> None:
    """fairseq's Python interface makes a generator for each call."""
    task = TranslationFastTask(TranslationFastConfig(compile_steps=True), dictionary, dictionary)
    model = build(ARCHITECTURES[0])
    one, other = (task.build_generator([model], Namespace(beam=3)) for _ in range(2))
    assert one.packing is other.packing
    assert one.compiled is other.compiled is not None
    assert "not compiled" not in caplog.text
    task.build_generator([model, model], Namespace(beam=3))
    assert caplog.messages == ["steps are not compiled: that is for plain beam search with one model of this plugin"]
