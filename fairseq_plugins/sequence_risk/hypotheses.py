"""Hypotheses of the model that is trained, from beam search or sampling."""

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

# Longest hypothesis: factor of the source length, and number of additional words, as in the paper.
_MAX_LENGTH = 1.5, 5

_MIN_LPROB = -80.0  # its exponential is still positive in float32


class HypothesisGenerator:
    """Beam search, or sampling, with a model in training.

    Args:
        task: translation task; candidates and precision of `translation_fast` apply.
        count: maximum number of hypotheses per sentence.
        sampling: whether to sample in training; validation always uses beam search.
    """

    def __init__(self, task: FairseqTask, count: int, sampling: bool) -> None:
        self.task, self.count, self.sampling = task, count, sampling
        self._packing = PackedWeightCache(str(getattr(getattr(task, "cfg", None), "cpu_dtype", "float32")))

    def generate(self, model: FairseqEncoderDecoderModel, sample: dict[str, Any]) -> list[list[list[int]]]:
        """Return the hypotheses of each sentence as tokens with the end, best first; sampling may repeat some.

        Dropout is off, as in the paper.  The model's state and modes are unchanged afterwards.
        """
        samples = self.sampling and model.training
        with _evaluating(model):
            # One generator per batch: as an attribute, it would register the model as a submodule of the criterion.
            generator = _Search(
                [model],
                self.task.target_dictionary,
                packing=self._packing,
                candidates=getattr(self.task, "candidates", None),
                beam_size=self.count,
                search_strategy=_Sampling(self.task.target_dictionary) if samples else None,
                max_len_a=_MAX_LENGTH[0],
                max_len_b=_MAX_LENGTH[1],
            )
            found = generator.generate(
                [model], sample
            )  # not `inference_step`, which returns empty hypotheses for blank sources
        return [[hypothesis["tokens"].tolist() for hypothesis in hypotheses] for hypotheses in found]


def _last_steps(lengths: Tensor) -> Tensor:
    """Return the last step of hypotheses for sources with the given lengths."""
    return (_MAX_LENGTH[0] * lengths + _MAX_LENGTH[1]).long()


class _Search(FastBeamSearch):
    """A search that limits hypotheses by the length of their own source, not by the longest source of the batch."""

    search: Search

    def __init__(self, models: Sequence[BaseFairseqModel], dictionary: Dictionary, **options: Any) -> None:
        super().__init__(models, dictionary, **options)
        if not self._is_plain_beam_search():
            self.search, self.should_set_src_lengths = _LimitedLength(self.search, dictionary), True

    def last_steps(self, source: Tensor, longest: int) -> Tensor:
        """Return the last step of each sentence, (B,)."""
        return _last_steps(source.ne(self.pad).sum(dim=1)).clamp(max=longest)


class _LimitedLength(Search):
    """A search strategy of fairseq with the length limits of `_Search`.

    Args:
        search: search strategy.
        dictionary: target words.
    """

    def __init__(self, search: Search, dictionary: Dictionary) -> None:
        super().__init__(dictionary)
        self.search = search

    def step(self, step: int, lprobs: Tensor, *args: Any) -> Any:
        """Choose words from log-probabilities, (B, k, V), which allow only the end after a sentence's last step."""
        words = torch.arange(lprobs.size(2), device=lprobs.device) != self.eos
        over = step >= _last_steps(self.src_lengths).to(lprobs.device)
        return self.search.step(step, lprobs.masked_fill(over.view(-1, 1, 1) & words, -math.inf), *args)


class _Sampling(Sampling):
    """fairseq's sampling, which fails if the probability of a forced end underflows; here it is rescaled first."""

    def step(self, step: int, lprobs: Tensor, *args: Any) -> Any:
        """Sample words; see fairseq's `Sampling`."""
        likeliest = lprobs.amax(dim=-1, keepdim=True)
        shift = likeliest.where(likeliest < _MIN_LPROB, 0)
        scores, *others = super().step(step, lprobs - shift, *args)
        return scores + shift.squeeze(-1), *others


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put all modules of a model in evaluation mode, and restore their modes afterwards."""
    in_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in in_training:
            module.training = True
