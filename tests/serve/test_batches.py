"""The queue of a model, with a translator that only records its batches."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import Any

from fairseq_plugins.cli.serve.batches import WIDER, Batches, Threads

MAX_TOKENS = 20


class Recorder:
    """Instead of translating, numbers its hypotheses; keeps the sources of each batch."""

    def __init__(self) -> None:
        self.config, self.batches = {"source_positions": 100}, list[list[list[str]]]()

    def options(self, replace_unk: None, attention: bool, beam: int, nbest: int = 1) -> Namespace:
        return Namespace(max_tokens=MAX_TOKENS, nbest=nbest)

    def segment(self, sentence: str) -> list[str]:
        return sentence.split()

    def batch(self, sources: list[list[str]], options: Namespace) -> list[dict[str, Any]]:
        self.batches.append(sources)
        return [{"words": words, "translations": [*range(options.nbest)]} for words in sources]


def answers(recorder: Any, calls: list[tuple[list[str], int]]) -> list[list[dict[str, Any]]]:
    """Return the answers of concurrent calls with sentences and a number of translations."""

    async def ask() -> list[list[dict[str, Any]]]:
        batches = Batches(recorder, Threads(1), beam=5, most=1000)
        asked = asyncio.gather(*(batches.translate(sentences, nbest, False) for sentences, nbest in calls))
        running = asyncio.ensure_future(batches.run())
        try:
            return await asyncio.wait_for(asked, 60)
        finally:
            running.cancel()

    return asyncio.run(ask())


def test_callers_of_a_batch_get_as_many_translations_as_they_asked_for() -> None:
    recorder = Recorder()
    found = answers(recorder, [(["w1 w2"], nbest) for nbest in (1, 4, 2)])
    assert max(map(len, recorder.batches)) > 1
    assert [len(each["translations"]) for (each,) in found] == [1, 4, 2]


def test_the_padded_size_of_batches_is_limited() -> None:
    """Only a sentence alone may be longer; each batch ends with its longest sentence."""
    recorder, lengths = Recorder(), [3, 50, 1, 9, 12, 7, 2, 20, 5, 1, 1, 4, 30, 6, 2, 11]
    answers(recorder, [(["w " * length], 1) for length in lengths])
    sizes = [[len(words) for words in batch] for batch in recorder.batches]
    assert sorted(size for batch in sizes for size in batch) == sorted(lengths)
    assert all(batch == sorted(batch) for batch in sizes)
    assert all(len(batch) * (batch[-1] + 1) <= WIDER * MAX_TOKENS for batch in sizes if len(batch) > 1)
    assert max(map(len, sizes)) > 1
