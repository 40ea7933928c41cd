"""Translations of a batch by the model as it is now: what a loss of whole sentences is computed over."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models import BaseFairseqModel, FairseqEncoderDecoderModel
from fairseq.search import Sampling, Search
from fairseq.tasks import FairseqTask
from torch import Tensor, nn

from fairseq_plugins.cpu.packing import PackedWeightCache
from fairseq_plugins.search.generator import FastBeamSearch

# Longest translation, a factor of the source's length and a summand, as the authors trained.
_LONGEST = 1.5, 5

_SMALLEST = -80.0  # the logarithm of a probability that float32 still has


class Translator:
    """The search, or the sampling, of a task's models while they are trained.

    Args:
        task: a translation task; of `translation_fast` the candidates and the precision of products are used.
        count: translations of each sentence, at most.
        sampling: whether in training they are drawn from the model's distribution; else they are the best that a beam
            search finds.
    """

    def __init__(self, task: FairseqTask, count: int, sampling: bool) -> None:
        self.task, self.count, self.sampling = task, count, sampling
        self._packing = PackedWeightCache(str(getattr(getattr(task, "cfg", None), "cpu_dtype", "float32")))

    def translate(self, model: FairseqEncoderDecoderModel, sample: dict[str, Any]) -> list[list[list[int]]]:
        """Translations of each sentence, the best first, as words and the end; several that are drawn may be alike.

        Dropout is off, as in the paper; the model's state and its modes are as before.
        """
        draws = self.sampling and model.training
        with _evaluating(model):
            # A new one for each batch: kept, it would make the model a part of its owner.
            generator = _Search(
                [model],
                self.task.target_dictionary,
                packing=self._packing,
                candidates=getattr(self.task, "candidates", None),
                beam_size=self.count,
                search_strategy=_Sampling(self.task.target_dictionary) if draws else None,
                max_len_a=_LONGEST[0],
                max_len_b=_LONGEST[1],
            )
            found = generator.generate([model], sample)  # not the task's, which leaves blank sources blank
        return [[hypothesis["tokens"].tolist() for hypothesis in hypotheses] for hypotheses in found]


def _last_steps(lengths: Tensor) -> Tensor:
    """The step in which translations of sources of these lengths end at the latest."""
    return (_LONGEST[0] * lengths + _LONGEST[1]).long()


class _Search(FastBeamSearch):
    """A search that limits each translation by the length of its own source; fairseq's takes that of the batch."""

    search: Search

    def __init__(self, models: Sequence[BaseFairseqModel], dictionary: Dictionary, **options: Any) -> None:
        super().__init__(models, dictionary, **options)
        if not self._is_plain():
            self.search, self.should_set_src_lengths = _Limited(self.search, dictionary), True

    def last_steps(self, source: Tensor, longest: int) -> Tensor:
        """The last step of each sentence, (B,)."""
        return _last_steps(source.ne(self.pad).sum(dim=1)).clamp(max=longest)


class _Limited(Search):
    """One of fairseq's searches, with the limits of `_Search`.

    Args:
        search: the search.
        dictionary: target words.
    """

    def __init__(self, search: Search, dictionary: Dictionary) -> None:
        super().__init__(dictionary)
        self.search = search

    def step(self, step: int, lprobs: Tensor, *args: Any) -> Any:
        """As fairseq's; after its last step a sentence, whose log-probabilities are (k, V), has no word but the end."""
        words = torch.arange(lprobs.size(2), device=lprobs.device) != self.eos
        over = step >= _last_steps(self.src_lengths).to(lprobs.device)
        return self.search.step(step, lprobs.masked_fill(over.view(-1, 1, 1) & words, -math.inf), *args)


class _Sampling(Sampling):
    """fairseq's, but for the forced end of a long translation, whose probability may be too small for a number."""

    def step(self, step: int, lprobs: Tensor, *args: Any) -> Any:
        """As fairseq's."""
        likeliest = lprobs.amax(dim=-1, keepdim=True)
        shift = likeliest.where(likeliest < _SMALLEST, 0)
        scores, *others = super().step(step, lprobs - shift, *args)
        return scores + shift.squeeze(-1), *others


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Within this context nothing in the model is in training; afterwards exactly what was before."""
    in_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in in_training:
            module.training = True
