"""Collect sentences of all callers into batches."""

from __future__ import annotations

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException

if TYPE_CHECKING:
    from fairseq_plugins.export.translate import Translator

Pair = tuple[str, str]  # source and target language
PATIENCE = 0.005  # seconds that the queue waits, after it has answered a call, for the next call of the same caller
# The lengths of callers' sentences differ more than the lengths of neighbouring sentences in a sorted text, so a batch
# needs more padding.  Padding counts towards max_tokens.  The server therefore multiplies max_tokens by WIDER.
WIDER = 2
ATTENTION = 1_000_000  # maximum number of attention weights in an answer
SHORT = 1000  # texts of this many characters or more are segmented in another thread
# A text's sentences are queued in groups of BURST sentences, and each group is due one batch after the previous group,
# so that short texts overtake long texts.
BURST = 16


class QueueFullError(HTTPException):
    """The queue has no room."""

    def __init__(self) -> None:
        super().__init__(429, "Slowdown: too many sentences wait, try again later")


class Threads:
    """The translating threads, which all models share; each thread translates one batch at a time."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.pool = ThreadPoolExecutor(number)
        self.free = asyncio.Semaphore(number)


@dataclass
class Wish:
    """The translations and attention weights that a call of `Batches.translate` requests."""

    nbest: int  # number of translations per sentence
    attention: int  # number of attention weights that the call may still receive


@dataclass(eq=False)
class Waiting:
    """A sentence in the queue; ``answer`` will be the result of `Translator.explain`."""

    words: list[str]  # the sentence's tokens, never an empty list
    wish: Wish
    due: float  # position in the queue
    answer: asyncio.Future[dict[str, Any]]


class Batches:
    """The queue of one model; sentences of similar lengths are translated together.

    Args:
        translator: the model.
        threads: translating threads.
        beam: beam size.
        most: largest number of sentences that wait or are being translated.
    """

    def __init__(self, translator: Translator, threads: Threads, beam: int, most: int) -> None:
        self.translator, self.beam, self.most = translator, beam, most
        self._options = partial(translator.options, None, beam=beam)
        self._max_tokens = WIDER * self._options(False).max_tokens
        self._threads = threads
        self._segmenting = ThreadPoolExecutor(1)  # for long texts
        self._waiting: list[Waiting] = []
        self._arrived = asyncio.Event()
        self._unanswered = 0  # number of sentences without an answer
        self._answered: list[tuple[float, int]] = []  # time and number of sentences of recently answered calls
        self._taken = 0  # number of batches so far

    async def translate(self, sentences: list[str], nbest: int, attention: bool) -> list[dict[str, Any]]:
        """Return the result of `Translator.explain` for each sentence; ``cut`` is the number of truncated tokens.

        If the call is cancelled, its sentences that still wait are removed from the queue.  If ``attention`` is true, a
        translation includes its attention weights.  However, all results of one call contain at most `ATTENTION`
        weights together; a translation that would exceed this limit omits its weights.

        Raises:
            QueueFullError: the queue has no room.
        """
        if self._unanswered + len(sentences) > self.most:
            raise QueueFullError
        loop, longest = asyncio.get_running_loop(), self.translator.config["source_positions"] - 1
        wish = Wish(nbest, ATTENTION if attention else 0)
        answers = [loop.create_future() for _ in sentences]
        for each in answers:
            each.add_done_callback(self._count)
        self._unanswered += len(sentences)
        # The queue waits for recently answered callers to call again, but cannot identify callers.  Assume that the
        # caller who was answered first has now called again.
        del self._answered[:1]
        try:
            if sum(map(len, sentences)) < SHORT:
                segmented = self._segment(sentences)
            else:
                segmented = await loop.run_in_executor(self._segmenting, self._segment, sentences)
            for rank, (words, answer) in enumerate(zip(segmented, answers, strict=True)):
                if words:
                    due = self._taken + rank / BURST
                    self._waiting.append(Waiting(words[:longest], wish, due, answer))
                else:  # no tokens, for example in a sentence of zero-width characters
                    answer.set_result({"words": [], "unknown": [], "translations": [_BLANK]})
            self._arrived.set()
            found = await asyncio.gather(*answers)
        except BaseException:
            for answer in answers:
                answer.cancel()
            self._waiting = [each for each in self._waiting if not each.answer.done()]
            raise
        self._answered.append((perf_counter(), len(sentences)))
        cut = (max(0, len(words) - longest) for words in segmented)
        return [{**answer, "cut": number} for answer, number in zip(found, cut, strict=True)]

    def _count(self, _: object) -> None:
        self._unanswered -= 1

    def _segment(self, sentences: list[str]) -> list[list[str]]:
        return [self.translator.segment(sentence) for sentence in sentences]

    async def run(self) -> None:
        """Translate batches of the queue until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._arrived.wait()
            await self._threads.free.acquire()
            await asyncio.sleep(0)  # Let `translate` resume and return the results of the last batch to its callers.
            end = perf_counter() + PATIENCE
            while perf_counter() < end and 0 < len(self._waiting) < self._share() and self._returning():
                # Wait for new sentences of callers that have just received answers.  Other models may use the thread.
                self._threads.free.release()
                await asyncio.sleep(0.001)
                await self._threads.free.acquire()
            batch = self._take()
            if not batch:
                self._arrived.clear()
                self._threads.free.release()
                continue
            self._taken += 1
            translated = loop.run_in_executor(self._threads.pool, self._translate, batch)
            translated.add_done_callback(partial(self._answer, batch))
            translated.add_done_callback(lambda _: self._threads.free.release())

    def _returning(self) -> int:
        """Return the number of sentences to expect if recently answered callers send as many sentences as last time."""
        oldest = perf_counter() - PATIENCE
        self._answered = [(time, sentences) for time, sentences in self._answered if time > oldest]
        return sum(sentences for _, sentences in self._answered)

    def _share(self) -> int:
        """Return the size of a batch: a thread's share of all sentences."""
        return math.ceil((self._unanswered + self._returning()) / self._threads.number)

    def _take(self) -> list[Waiting]:
        """Take a batch from the queue: the next sentence in order, and sentences of similar length."""
        queue = sorted((each for each in self._waiting if not each.answer.done()), key=lambda each: len(each.words))
        most = min(len(queue), self._share())
        low = min(range(len(queue)), key=lambda at: queue[at].due, default=0)
        high = min(low + 1, len(queue))
        while high - low < most:
            wider = [(low - 1, high)] if low else []
            wider += [(low, high + 1)] if high < len(queue) else []
            near = {len(queue[b - 1].words) - len(queue[a].words): (a, b) for a, b in wider}
            a, b = near[min(near)]
            if (b - a) * (len(queue[b - 1].words) + 1) > self._max_tokens:
                break
            low, high = a, b
        self._waiting = queue[:low] + queue[high:]
        return queue[low:high]

    def _translate(self, batch: list[Waiting]) -> list[dict[str, Any] | Exception]:
        """Return a result or an error for each sentence; an error in one sentence does not affect others."""
        try:
            nbest = max(each.wish.nbest for each in batch)
            options = self._options(any(each.wish.attention for each in batch), nbest=nbest)
            return [*self.translator.batch([each.words for each in batch], options)]
        except Exception as error:  # for example, too little memory
            return [error] if len(batch) == 1 else [self._translate([each])[0] for each in batch]

    def _answer(self, batch: list[Waiting], translated: asyncio.Future[list[dict[str, Any] | Exception]]) -> None:
        for each, told in zip(batch, translated.result(), strict=True):
            if each.answer.done():  # the call was cancelled
                continue
            if isinstance(told, Exception):
                each.answer.set_exception(told)
            else:
                kept = [_limited(found, each.wish) for found in told["translations"][: each.wish.nbest]]
                each.answer.set_result({**told, "translations": kept})


def _limited(translation: dict[str, Any], wish: Wish) -> dict[str, Any]:
    """Return a translation; drop its attention weights if their number exceeds ``wish.attention``."""
    size = translation["attention"].size if "attention" in translation else 0
    if size and size <= wish.attention:
        wish.attention -= size
        return translation
    return {name: value for name, value in translation.items() if name != "attention"}


_BLANK = {"text": "", "score": 0.0, "words": [], "unknown": []}
