"""The queue of a model, with a translator that only records its batches."""

from __future__ import annotations

import asyncio
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from fairseq_plugins.cli.serve import batches
from fairseq_plugins.cli.serve.batches import WIDER, Batches, Threads

MAX_TOKENS = 20


class Recorder:
    """Instead of translating, numbers its hypotheses; keeps the sources of each batch, which takes some seconds."""

    def __init__(self, seconds: float = 0) -> None:
        self.config, self.batches, self.seconds = {"source_positions": 100}, list[list[list[str]]](), seconds

    def options(self, replace_unk: None, attention: bool, beam: int, nbest: int = 1) -> Namespace:
        return Namespace(max_tokens=MAX_TOKENS, nbest=nbest, attention=attention)

    def segment(self, sentence: str) -> list[str]:
        return sentence.split()

    def batch(self, sources: list[list[str]], options: Namespace) -> list[dict[str, Any]]:
        self.batches.append(sources)
        time.sleep(self.seconds)
        translation = {"text": "", **({"attention": np.ones((1, 1, 2))} if options.attention else {})}
        return [{"words": words, "translations": [translation] * options.nbest} for words in sources]


@asynccontextmanager
async def running(recorder: Any, threads: Threads | None = None) -> AsyncIterator[Batches]:
    queue = Batches(recorder, threads or Threads(1), beam=5, most=1000)
    task = asyncio.ensure_future(queue.run())
    yield queue
    task.cancel()


def answers(recorder: Any, *calls: tuple[list[str], int, bool]) -> list[Any]:
    """Return the answers and errors of concurrent calls with sentences, a number of translations, and attention."""

    async def ask() -> list[Any]:
        async with running(recorder) as queue:
            asked = (queue.translate(*call) for call in calls)
            return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 60)

    return asyncio.run(ask())


def test_callers_of_a_batch_get_the_translations_and_attention_that_they_asked_for() -> None:
    recorder, wishes = Recorder(), [(1, True), (4, False), (2, True)]
    found = answers(recorder, *((["w1 w2"], *wish) for wish in wishes))
    assert len(recorder.batches) == 1
    assert [(len(told["translations"]), "attention" in told["translations"][0]) for (told,) in found] == wishes


def test_the_padded_size_of_batches_is_limited() -> None:
    """Only a sentence alone may be longer; each batch ends with its longest sentence."""
    recorder, lengths = Recorder(), [3, 50, 1, 9, 12, 7, 2, 20, 5, 1, 1, 4, 30, 6, 2, 11]
    answers(recorder, *((["w " * length], 1, False) for length in lengths))
    sizes = [[len(words) for words in batch] for batch in recorder.batches]
    assert sorted(size for batch in sizes for size in batch) == sorted(lengths)
    assert all(batch == sorted(batch) for batch in sizes)
    assert all(len(batch) * (batch[-1] + 1) <= WIDER * MAX_TOKENS for batch in sizes if len(batch) > 1)
    assert max(map(len, sizes)) > 1


async def seconds(*calls: Coroutine[Any, Any, Any]) -> float:
    began = time.perf_counter()
    await asyncio.gather(*calls)
    return time.perf_counter() - began


def test_a_lone_caller_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text is one batch; after many callers have left, only its first request waits for them."""
    monkeypatch.setattr(batches, "PATIENCE", 0.2)

    async def ask(recorder: Any) -> tuple[list[float], list[float]]:
        async with running(recorder) as queue:

            async def call(size: int = 1) -> float:
                return await seconds(queue.translate(["w"] * size, 1, False))

            alone = [await call(size) for size in (9, 1, 9, 2, 1)]
            assert [len(batch) for batch in recorder.batches] == [9, 1, 9, 2, 1]
            await asyncio.gather(*(call() for _ in range(50)))
            return alone, [await call() for _ in range(20)]

    alone, after = asyncio.run(ask(Recorder()))
    assert max(alone) < 0.1
    assert max(after[1:]) < 0.1


def test_idle_threads_wait_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "PATIENCE", 0.2)

    async def ask() -> float:
        async with running(Recorder(), Threads(4)) as queue:
            await queue.translate(["w"] * 200, 1, False)
            return await seconds(*(queue.translate(["w " * 30], 1, False) for _ in range(4)))

    assert asyncio.run(ask()) < 0.3


def test_other_models_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a model has no sentences, or waits for a caller that may return, another model uses the thread."""
    monkeypatch.setattr(batches, "PATIENCE", 0.2)

    async def ask() -> list[float]:
        threads = Threads(1)
        async with running(Recorder(), threads) as first, running(Recorder(), threads) as second:
            await asyncio.gather(*(first.translate(["w"], 1, False) for _ in range(9)))
            took = [await seconds(second.translate(["w"], 1, False))]
            waiting = asyncio.ensure_future(first.translate(["w"], 1, False))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            took.append(await seconds(second.translate(["w"], 1, False)))
            await waiting
        return took

    assert max(asyncio.run(ask())) < 0.1


def test_attention_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a few long texts could fill the memory."""
    monkeypatch.setattr(batches, "ATTENTION", 7)
    (found,) = answers(Recorder(), (["w"] * 3, 2, True))
    with_attention = [["attention" in each for each in told["translations"]] for told in found]
    assert with_attention == [[True, True], [True, False], [False, False]]


def test_an_error_of_one_sentence_does_not_reach_other_callers() -> None:
    class Failing(Recorder):
        def batch(self, sources: list[list[str]], options: Namespace) -> list[dict[str, Any]]:
            if ["bad"] in sources:
                raise MemoryError("too much")
            return super().batch(sources, options)

    first, second, third = answers(Failing(), *(([text], 1, False) for text in ("good", "bad", "good")))
    assert first[0]["words"] == third[0]["words"] == ["good"]
    assert isinstance(second, MemoryError)


def test_withdrawn_sentences_leave_the_queue() -> None:
    """Even while a long batch is translated; otherwise callers could exceed the queue's limit."""

    async def ask() -> int:
        async with running(Recorder(seconds=0.3)) as queue:
            first = asyncio.ensure_future(queue.translate(["w"], 1, False))
            await asyncio.sleep(0.1)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(queue.translate(["w"] * 900, 1, False), 0.05)
            left = len(queue._waiting)
            await first
        return left

    assert asyncio.run(ask()) == 0


@pytest.mark.parametrize("callers", [12, 24])
def test_batches_wait_for_callers_that_return(callers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 20 callers share each batch, even if some return later than others, or others already wait."""
    monkeypatch.setattr(batches, "PATIENCE", 0.05)

    async def ask(recorder: Any) -> None:
        async def caller(delay: float) -> None:
            for _ in range(20):
                await queue.translate(["w"], 1, False)
                await asyncio.sleep(delay)

        async with running(recorder) as queue:
            await asyncio.gather(*(caller(number % 12 / 1000) for number in range(callers)))

    recorder = Recorder(seconds=0.005)
    asyncio.run(ask(recorder))
    assert len(recorder.batches) < 1.4 * callers * 20 / min(callers, 20)
