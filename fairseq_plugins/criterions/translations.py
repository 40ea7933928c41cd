"""Translations of a batch by the model as it is now: what a loss of whole sentences is computed over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fairseq.models import FairseqEncoderDecoderModel
from fairseq.search import Sampling
from fairseq.tasks import FairseqTask
from torch import Tensor, nn

from fairseq_plugins.cpu.packing import Packing
from fairseq_plugins.generation.beam_search import FastBeamSearch

__all__ = ["Translator"]

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
        self._packing = Packing(str(getattr(getattr(task, "cfg", None), "cpu_dtype", "float32")))

    def translate(self, model: FairseqEncoderDecoderModel, sample: dict[str, Any]) -> list[list[list[int]]]:
        """Translations of each sentence, the best first, as words and the end; several that are drawn may be alike.

        Dropout is off, as in the paper; the model's state and its modes are as before.
        """
        draws = self.sampling and model.training
        with _evaluating(model):
            # A new one for each batch: kept, it would make the model a part of its owner.
            generator = FastBeamSearch(
                [model],
                self.task.target_dictionary,
                packing=self._packing,
                candidates=getattr(self.task, "candidates", None),
                beam_size=self.count,
                search_strategy=_Sampling(self.task.target_dictionary) if draws else None,
                max_len_a=_LONGEST[0],
                max_len_b=_LONGEST[1],
            )
            found = self.task.inference_step(generator, [model], sample)
        return [[hypothesis["tokens"].tolist() for hypothesis in hypotheses] for hypotheses in found]


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
