"""fairseq's Python interface: ``from_pretrained``, and the hub that it returns."""

from __future__ import annotations

import copy
import functools
import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.hub_utils import GeneratorHubInterface
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from omegaconf import OmegaConf

from fairseq_plugins.repairs import hub
from fairseq_plugins.search.generator import FastBeamSearch
from tests.commands import save_model
from tests.conftest import enliven, random_model

FCONV = {"encoder_layers": "[(16, 3)]", "decoder_layers": "[(16, 3)]"}
LINES = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9"]


@pytest.fixture(scope="module")
def load(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """``load(architecture, option=value, ...)``: a random model, as `from_pretrained` returns it.

    With ``old=True`` its checkpoint has its options in the form that fairseq had before 0.11.
    """
    folder = tmp_path_factory.mktemp("hub")
    task = TranslationTask.setup_task(TranslationConfig(data=str(data), source_lang="src", target_lang="tgt"))

    @functools.cache
    def checkpoint(architecture: str, old: bool) -> str:
        options = {"source_lang": "src", "target_lang": "tgt", "criterion": "cross_entropy", "task": "translation"}
        args, model = random_model(architecture, task, **options, **(FCONV if architecture == "fconv" else {}))
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
    assert (generator.packing.precision, generator.model.word_penalty) == ("int8", 0.5)
    plain, exact = load(old=old), load(old=old, task="translation_fast")
    assert type(plain.task) is TranslationTask
    for beams, others in zip(generate(plain), generate(exact), strict=True):
        assert [hypo["tokens"].tolist() for hypo in beams] == [hypo["tokens"].tolist() for hypo in others]


def test_it_translates_among_candidates(load, tmp_path: Path) -> None:
    (tmp_path / "candidates.txt").write_text("".join(f"w{number} w{number + 1} 0.5\n" for number in range(10)))
    (tmp_path / "frequent.txt").write_text("".join(f"w{number} 9\n" for number in range(15, 20)))
    fast = load(task="translation_fast", candidates=str(tmp_path), frequent_candidates=5)
    assert fast.task.build_generator(fast.models, fast.cfg.generation).candidates is not None
    words = fast.translate("w1 w2 w3", beam=2, max_len_b=8).split()
    assert words
    assert set(words) <= {"w2", "w3", "w4", *(f"w{number}" for number in range(15, 20))}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"cpu_dtype": "int8"},
            "cpu_dtype is not an option of task='translation'; give task=, one of translation_fast",
        ),
        ({"task": "translation_fats"}, "task='translation_fats' is not registered"),
        ({"bpe": "subword_nm"}, "bpe='subword_nm' is not registered; use one of bert, byte_bpe"),
        ({"tokenizer": "mose"}, "tokenizer='mose' is not registered; use one of moses, nltk, space"),
        ({"beam": 1}, "beam does nothing in from_pretrained, got 1; "),
        ({"generation_args": {"beam": 1}}, "beam does nothing in from_pretrained, got 1; "),
        ({"fp16": True}, "fp16 does nothing in from_pretrained, got True; "),
        ({"model_overrides": "{'dropout': 0.1}"}, "model_overrides does nothing in from_pretrained, got "),
        ({"nbest": 3}, "nbest does nothing in from_pretrained, got 3; "),
    ],
)
@pytest.mark.parametrize("old", [False, True])
def test_options_that_would_do_nothing_are_refused(load, options: dict[str, str], message: str, old: bool) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        load(old=old, **options)


def test_defaults_of_unread_options_are_taken(load) -> None:
    hub = load(beam=5, nbest=1, fp16=False, lenpen=2.0, bpe=None)
    assert hub.cfg.generation.lenpen == 2
    assert len(hub.generate([hub.encode("w1")], max_len_b=8, nbest=1)[0]) == 5


def test_a_registered_name_of_a_user_dir(load, tmp_path: Path) -> None:
    lines = ["from fairseq.data.encoders import register_bpe", "@register_bpe('mine')", "class Mine:"]
    lines += ["    def __init__(self, _):", "        pass", "    def encode(self, line):", "        return 'w1'"]
    (tmp_path / "hub_user_dir").mkdir()
    (tmp_path / "hub_user_dir" / "__init__.py").write_text("\n".join(lines))
    assert load(user_dir=str(tmp_path / "hub_user_dir"), bpe="mine").apply_bpe("w2") == "w1"


@pytest.mark.parametrize("name", ["model_name_or_path", "data_name_or_path"])
def test_a_missing_folder_is_named(data: Path, name: str) -> None:
    places = {"model_name_or_path": str(data), "data_name_or_path": str(data), name: "nowhere"}
    with pytest.raises(FileNotFoundError, match="'nowhere' is not a folder, archive or known model"):
        hub.hub_utils.from_pretrained(**places)


def test_a_task_with_options_in_the_old_way_is_refused(load) -> None:
    with pytest.raises(ValueError, match=r"^task='multilingual_translation' "):
        load(task="multilingual_translation")


def test_unread_options_are_reported(load, caplog: pytest.LogCaptureFixture) -> None:
    idle = {"bf16": True, "lr": [0.5], "nonsense": 1, "post_process": "subword_nmt", "seed": 1}
    hub = load(lenpen=0.5, bpe=None, max_tokens=500, **idle)
    hub.translate("w1 w2", beam=2, max_len_b=5, lenpan=9, skip_invalid_size_inputs=True)
    told = [record.message for record in caplog.records if "does nothing" in record.message]
    expected = [f"{each} does nothing: it is not an option of translation" for each in idle]
    assert sorted(set(told)) == sorted([*expected, "lenpan does nothing: it is not an option of a search"])


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
    assert not generate(model)[0][0]["attention"].numel()  # it is not reported without print_alignment
    soft = generate(model, print_alignment="soft")
    assert len(soft[0][0]["alignment"]) == len(soft[0][0]["tokens"])


def test_fconv_aligns_too(load) -> None:
    """Modules without such a switch have none afterwards."""
    hub = load("fconv")
    switches = [hasattr(module, "need_attn") for module in hub.modules()]
    assert generate(hub, print_alignment="hard")[0][0]["alignment"]
    assert [hasattr(module, "need_attn") for module in hub.modules()] == switches


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score_reference": True}, "fairseq-generate --score-reference"),
        ({"replace_unk": ""}, "fairseq-interactive --replace-unk"),
        ({"retain_dropout": True}, "retain_dropout does nothing in generate, got True; give it to from_pretrained"),
        ({"lm_path": "lm.pt"}, "fairseq-generate --lm-path"),
        ({"lm_weight": 0.3}, "fairseq-generate --lm-path"),
        ({"sacrebleu": True}, "fairseq-generate --scoring sacrebleu"),
        ({"decoding_format": "vote"}, "--decoding-format does nothing in"),
        ({"beam": 0}, "--beam must be a whole number and at least 1, got 0"),
        ({"beam": 3.0}, "--beam must be a whole number and at least 1, got 3.0"),
        ({"prefix_size": 1}, "prefix_tokens"),
        ({"nbest": 3}, "nbest does nothing in generate, got 3; "),
        ({"cpu_dtype": "int8"}, "cpu_dtype is an option of a task: give it to from_pretrained"),
    ],
)
def test_unread_options_of_generate_are_refused(load, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(load(task="translation_fast"), **options)


def test_arguments_of_one_sentence(load) -> None:
    """fairseq ignores the arguments of a sentence outside a list, and gives them to another one of several."""
    model = load(task="translation_fast")
    sentence, prefix = model.encode("w1 w2 w3"), torch.tensor([[7, 8]])
    for given in (sentence, [sentence]):
        found = model.generate(given, max_len_b=8, inference_step_args={"prefix_tokens": prefix})
        best = found[0] if given is sentence else found[0][0]
        assert best["tokens"][:2].tolist() == [7, 8]
    both, others = [sentence, sentence[1:]], torch.tensor([[7, 8], [9, 9]])
    for found in model.generate(both, max_len_b=8, inference_step_args={"prefix_tokens": prefix.expand(2, -1)}):
        assert found[0]["tokens"][:2].tolist() == [7, 8]
    with pytest.raises(ValueError, match="inference_step_args of single sentences"):
        model.generate(both, 5, False, False, {"prefix_tokens": others})


@pytest.mark.parametrize("limit", ["batch", "model"])
def test_a_skipped_sentence_keeps_its_place(load, limit: str) -> None:
    model = load(max_tokens=4 if limit == "batch" else 99)
    model.max_positions = (99 if limit == "batch" else 4, 99)
    *short, longest = LINES
    found = model.translate([longest, *short, longest], skip_invalid_size_inputs=True, max_len_b=8)
    assert found == ["", *model.translate(short, max_len_b=8), ""]
    assert model.translate([longest], skip_invalid_size_inputs=True) == [""]


def test_dropout_that_is_retained(load) -> None:
    hub = load(retain_dropout=True)
    assert len({float(generate(hub)[0][0]["score"]) for _ in range(3)}) == 3


def test_score_is_refused(load) -> None:
    with pytest.raises(ValueError, match="score_reference and score"):
        load().score("w1 w2")


def test_language_models_score(dictionary: Dictionary) -> None:
    args = Namespace(arch="transformer_lm", task="language_modeling", criterion="cross_entropy", tokens_per_sample=16)
    vars(args).update(decoder_embed_dim=8, decoder_ffn_embed_dim=8, decoder_layers=1, decoder_attention_heads=1)
    ARCH_CONFIG_REGISTRY[args.arch](args)
    cfg = convert_namespace_to_omegaconf(args)
    task = LanguageModelingTask(cfg.task, dictionary)
    model = task.build_model(cfg.model).eval()
    hub = GeneratorHubInterface(cfg, task, [model])
    words = hub.encode("w1 w2 w3")[:-1]
    before = torch.cat([torch.tensor([dictionary.eos()]), words[:-1]])
    with torch.no_grad():
        wanted = model(before.unsqueeze(0))[0][0].log_softmax(dim=1)[range(3), words]
    torch.testing.assert_close(hub.score("w1 w2 w3")["positional_scores"], wanted)


def test_a_copy_translates_alike(load, architecture: str) -> None:
    model = load(architecture, task="translation_fast")
    wanted = model.translate(LINES, max_len_b=8)
    twin = copy.deepcopy(model)
    assert twin.task is not model.task
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert twin.translate(LINES, max_len_b=8) == wanted


def test_a_whole_task_is_left_to_fairseq() -> None:
    cfg = OmegaConf.create({"task": {"_name": "translation", "data": "a"}})
    hub.checkpoint_utils.overwrite_args_by_name(cfg, {"task": {"data": "b"}})
    assert cfg.task == {"_name": "translation", "data": "b"}
    with pytest.raises(AttributeError, match="no factory"):
        hub.StatefulContainer().words  # noqa: B018  (it looks for it)


def test_another_part_replaces_that_of_the_checkpoint() -> None:
    """``fairseq-validate --criterion`` and ``from_pretrained(..., bpe=...)`` ask for it."""
    parts = {"criterion": {"_name": "cross_entropy", "sentence_avg": True}, "bpe": {"_name": "bert"}}
    cfg = OmegaConf.create(parts | {"optimization": {"sentence_avg": True}})
    overrides = {"criterion": "label_smoothed_cross_entropy", "label_smoothing": 0.5, "bpe": "characters"}
    hub.checkpoint_utils.overwrite_args_by_name(cfg, overrides)
    assert (cfg.criterion._name, cfg.criterion.label_smoothing) == ("label_smoothed_cross_entropy", 0.5)
    assert cfg.bpe == "characters"
    hub.checkpoint_utils.overwrite_args_by_name(cfg, {"criterion": "label_smoothed_cross_entropy"})
    assert cfg.criterion.label_smoothing == 0.5
