"""fairseq's Python interface: ``from_pretrained``, and the hub that it returns."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from omegaconf import OmegaConf

from fairseq_plugins.repairs import hub
from fairseq_plugins.search.generator import FastBeamSearch
from tests.commands import save_model
from tests.conftest import enliven, random_model

LINES = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9"]


@pytest.fixture(scope="module")
def load(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Return ``load(architecture, option=value, ...)``, which loads a random model by `from_pretrained`.

    With ``old=True``, the checkpoint has options in the format of fairseq before 0.11.
    """
    folder = tmp_path_factory.mktemp("hub")
    task = TranslationTask.setup_task(TranslationConfig(data=str(data), source_lang="src", target_lang="tgt"))

    @functools.cache
    def checkpoint(architecture: str, old: bool) -> str:
        options = {"source_lang": "src", "target_lang": "tgt", "criterion": "cross_entropy", "task": "translation"}
        args, model = random_model(architecture, task, **options)
        enliven(model)
        path = save_model(model, args, folder / f"{architecture}{old}.pt")
        if not old:
            cfg = OmegaConf.to_container(convert_namespace_to_omegaconf(args))
            torch.save({**torch.load(path), "args": None, "cfg": cfg}, path)
        return path.name

    def load(architecture: str = "convs2s_tiny", old: bool = False, **options: Any) -> Any:
        model = ARCH_MODEL_REGISTRY[architecture]
        return model.from_pretrained(str(folder), checkpoint(architecture, old), data_name_or_path=str(data), **options)

    return load


def generate(model: Any, **options: Any) -> list[list[dict[str, Any]]]:
    return model.generate([model.encode(line) for line in LINES], max_len_b=8, **options)


@pytest.mark.parametrize("old", [False, True])
def test_the_fast_search_takes_any_checkpoint(load, old: bool) -> None:
    fast = load(old=old, task="translation_fast", cpu_dtype="int8", word_penalty=0.5)
    generator = fast.task.build_generator(fast.models, fast.cfg.generation)
    assert type(generator) is FastBeamSearch
    assert (generator.weight_cache.precision, generator.model.word_penalty) == ("int8", 0.5)
    plain, exact = load(old=old), load(old=old, task="translation_fast")
    assert type(plain.task) is TranslationTask
    for beams, others in zip(generate(plain), generate(exact), strict=True):
        assert [hypo["tokens"].tolist() for hypo in beams] == [hypo["tokens"].tolist() for hypo in others]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"cpu_dtype": "int8"},
            "cpu_dtype is not an option of task='translation'; set task to one of translation_fast",
        ),
        ({"beam": 1}, "beam does nothing in from_pretrained, got 1; "),
        ({"generation_args": {"beam": 1}}, "beam does nothing in from_pretrained, got 1; "),
        ({"fp16": True}, "fp16 does nothing in from_pretrained, got True; "),
        ({"replace_unk": ""}, "replace_unk does nothing in from_pretrained, got ''; "),
    ],
)
@pytest.mark.parametrize("old", [False, True])
def test_options_without_effect_are_refused(load, options: dict[str, str], message: str, old: bool) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        load(old=old, **options)


def test_defaults_of_unread_options_are_accepted(load) -> None:
    hub = load(beam=5, nbest=1, fp16=False, lenpen=2.0, bpe=None)
    assert hub.cfg.generation.lenpen == 2
    assert len(hub.generate([hub.encode("w1")], max_len_b=8, nbest=1)[0]) == 5


@pytest.mark.parametrize("name", ["model_name_or_path", "data_name_or_path"])
def test_a_missing_folder_is_named(data: Path, name: str) -> None:
    places = {"model_name_or_path": str(data), "data_name_or_path": str(data), name: "nowhere"}
    with pytest.raises(FileNotFoundError, match="'nowhere' is not a folder, archive or known model"):
        hub.hub_utils.from_pretrained(**places)


@pytest.mark.parametrize("task", ["multilingual_translation", "translation_fats"])
def test_a_task_that_accepts_no_checkpoint_is_refused(load, task: str) -> None:
    with pytest.raises(ValueError, match=f"^task='{task}' "):
        load(task=task)


@pytest.mark.parametrize("task", ["translation", "translation_fast"])
def test_alignments_are_those_of_a_model_that_was_prepared_for_them(load, architecture: str, task: str) -> None:
    model, prepared = (load(architecture, task=task, **options) for options in ({}, {"print_alignment": "hard"}))
    before, found = generate(model), generate(model, print_alignment="hard")
    wanted = generate(prepared)
    for beams, others, plain in zip(found, wanted, before, strict=True):
        for hypo, other, alone in zip(beams, others, plain, strict=True):
            assert hypo["alignment"] == other["alignment"]
            assert torch.equal(hypo["tokens"], alone["tokens"])
    assert any(hypo["alignment"] for beams in found for hypo in beams)
    assert not generate(model)[0][0]["attention"].numel()  # attention is not returned without print_alignment
    soft = generate(model, print_alignment="soft")
    assert len(soft[0][0]["alignment"]) == len(soft[0][0]["tokens"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score_reference": True}, "score_reference does nothing in hub.generate"),
        ({"replace_unk": ""}, "replace_unk does nothing in hub.generate"),
        ({"retain_dropout": True}, "retain_dropout does nothing in hub.generate"),
        ({"prefix_size": 1}, r"prefix_size does nothing in hub.generate, got 1; give inference_step_args=\{"),
        ({"beam": 0}, "--beam must be a whole number of at least 1, got 0"),
        ({"beam": 3.0}, "--beam must be a whole number of at least 1, got 3.0"),
        ({"cpu_dtype": "int8"}, "cpu_dtype is an option of a task: give it to from_pretrained"),
    ],
)
def test_unread_options_of_generate_are_refused(load, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(load(task="translation_fast"), **options)


def test_arguments_of_one_sentence(load) -> None:
    """fairseq ignores arguments of a sentence outside a list, and gives those of one sentence in a list to another."""
    model = load(task="translation_fast")
    sentence, prefix = model.encode("w1 w2 w3"), torch.tensor([[7, 8]])
    for given in (sentence, [sentence]):
        found = model.generate(given, max_len_b=8, inference_step_args={"prefix_tokens": prefix})
        best = found[0] if given is sentence else found[0][0]
        assert best["tokens"][:2].tolist() == [7, 8]
    both, others = [sentence, sentence[1:]], torch.tensor([[7, 8], [9, 9]])
    for found in model.generate(both, max_len_b=8, inference_step_args={"prefix_tokens": prefix.expand(2, -1)}):
        assert found[0]["tokens"][:2].tolist() == [7, 8]
    with pytest.raises(ValueError, match="inference_step_args must be equal"):
        model.generate(both, 5, False, False, {"prefix_tokens": others})


def test_dropout_that_is_retained(load) -> None:
    hub = load(retain_dropout=True)
    assert len({float(generate(hub, retain_dropout=True)[0][0]["score"]) for _ in range(3)}) == 3


@pytest.mark.parametrize("option", ["task", "bpe"])
def test_unregistered_names_are_refused(load, option: str) -> None:
    with pytest.raises(ValueError, match=f"^{option}='nowhere' is not registered"):
        load(**{option: "nowhere"})
