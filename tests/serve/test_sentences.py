"""Splitting of texts into sentences."""

from __future__ import annotations

import time

import pytest

from fairseq_plugins.cli.catalogues import placeholders
from fairseq_plugins.cli.serve.parameters import split


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("Hello. How are you?", ["Hello.", "How are you?"]),
        ('He said "Go." Then he left… Ok', ['He said "Go."', "Then he left…", "Ok"]),
        ("  one\n\n two \r\nthree.\n", ["one", "two", "three."]),
        ("Dr. Smith saw J. Doe on 3. May. Yes.", ["Dr. Smith saw J. Doe on 3. May.", "Yes."]),
        ("It costs 3.14 at www.a.de. «Oui.» and then", ["It costs 3.14 at www.a.de.", "«Oui.» and then"]),
        ("我很好。你呢？好", ["我很好。", "你呢？", "好"]),
        ("", []),
        (" \n ", [""]),
    ],
)
def test_sentences(text: str, sentences: list[str]) -> None:
    found = split(text)
    assert [each.text for each in found] == sentences
    assert "".join("".join(each) for each in found) == text


@pytest.mark.parametrize(
    "text", [".", " ", ".'", ". ", "\n", "。", ":a", "%(a)0", "%0", "0", "``", "<a ", "|a", "{", "%("]
)
def test_time_grows_with_the_length(text: str) -> None:
    """Text that provokes backtracking takes less than 5 s."""
    began = time.process_time()
    for hostile in (text * 50_000, "%" + text * 50_000, "%(a)" + text * 50_000):
        split(hostile)
        placeholders(hostile)
    assert time.process_time() - began < 5
