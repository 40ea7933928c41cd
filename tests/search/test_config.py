"""The options of the task translation_fast, as fairseq makes them of its dataclass."""

from __future__ import annotations

from argparse import ArgumentParser

import pytest
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.tasks.translation import TranslationConfig

from fairseq_plugins.search.config import TranslationFastConfig

# Where nothing is said the words are those of fairseq's search; the two numbers count only with candidates.
DEFAULTS = {
    "candidates": None,
    "candidates_per_word": 20,
    "frequent_candidates": 1000,
    "cpu_dtype": "float32",
    "compile_steps": False,
    "word_penalty": 0.0,
    "attention_offset": 0,
}


@pytest.fixture
def parser() -> ArgumentParser:
    made = ArgumentParser()
    gen_parser_from_dataclass(made, TranslationFastConfig())
    return made


def test_defaults(parser: ArgumentParser) -> None:
    said = vars(parser.parse_args(["data"]))
    assert {name: said[name] for name in DEFAULTS} == DEFAULTS
    fairseqs = ArgumentParser()
    gen_parser_from_dataclass(fairseqs, TranslationConfig())
    assert {**vars(fairseqs.parse_args(["data"])), **DEFAULTS} == said


def test_values(parser: ArgumentParser) -> None:
    given = "--candidates folder --candidates-per-word 3 --frequent-candidates 0 --cpu-dtype int8 --compile-steps"
    said = parser.parse_args(["data", *given.split(), "--word-penalty", "-0.5", "--attention-offset", "-1"])
    values = ["folder", 3, 0, "int8", True, -0.5, -1]
    assert [getattr(said, name) for name in DEFAULTS] == values
    with pytest.raises(SystemExit):
        parser.parse_args(["data", "--cpu-dtype", "float16"])
