"""The search, in all of fairseq's forms, inside the candidate vocabulary of each batch.

V target words, n candidates, R rows (hypotheses), T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models import BaseFairseqModel
from fairseq.search import PrefixConstrainedBeamSearch
from fairseq.sequence_generator import EnsembleModel, SequenceGeneratorWithAlignment
from torch import Tensor

from fairseq_plugins.generation.beam_search import FastBeamSearch
from fairseq_plugins.generation.candidates import Candidates
from fairseq_plugins.models.output_layer import narrowed

__all__ = ["CandidateSearch", "CandidateSearchWithAlignment"]


class CandidateSearch(FastBeamSearch):
    """A generator with a vocabulary of its own for each batch, so that scores, softmax and top-k are as small.

    The search knows words by their numbers among the candidates; decoders and callers know them by those of the
    dictionary.  Words that the caller forces (prefixes, constraints) are candidates too.

    Args:
        models: the ensemble.
        tgt_dict: target words.
        candidates: of any batch.
        options: of `FastBeamSearch`.

    Raises:
        ValueError: an option that needs the whole vocabulary.
    """

    def __init__(
        self,
        models: Sequence[BaseFairseqModel] | EnsembleModel,
        tgt_dict: Dictionary,
        candidates: Candidates,
        **options: Any,
    ) -> None:
        super().__init__(models, tgt_dict, **options)
        if self.lm_model is not None:
            raise ValueError("--candidates does not go with --lm-path: a language model scores the whole vocabulary")
        if isinstance(self.search, PrefixConstrainedBeamSearch):
            raise ValueError("--candidates does not go with prefix_allowed_tokens_fn, whose words are not known before")
        self.candidates = candidates

    def _generate(
        self,
        sample: dict[str, Any],
        prefix_tokens: Tensor | None = None,
        constraints: Tensor | None = None,
        bos_token: int | None = None,
    ) -> list[list[dict[str, Tensor]]]:
        """As fairseq's.

        Raises:
            ValueError: there are too few candidates to choose from.
        """
        src_tokens = sample["net_input"]["src_tokens"]
        suppressed = self.token_indices_to_suppress
        # Packed constraints begin with their number; zero, which ends each, is a special symbol and stays zero.
        forced = [constraints[:, 1:] if constraints is not None else None, prefix_tokens, suppressed]
        mask = self.candidates.mask(src_tokens)
        for tokens in forced:
            if tokens is not None:
                mask.index_fill_(0, tokens.flatten().to(mask.device), True)
        if bos_token is not None:
            mask[bos_token] = True
        words = mask.nonzero().flatten()
        self._check_size(len(words))
        number = mask.cumsum(0) - 1  # among the candidates, of each that is one
        prefix_tokens, suppressed = (None if tokens is None else number[tokens] for tokens in forced[1:])
        if constraints is not None:
            constraints = torch.cat([constraints[:, :1], number[constraints[:, 1:]]], dim=1)
        if bos_token is not None:
            bos_token = int(number[bos_token])

        with ExitStack() as stack:
            for model in self.model.models:
                stack.enter_context(narrowed(model, words))
            stack.enter_context(_set(self.model, words=words))
            stack.enter_context(_set(self, vocab_size=len(words), token_indices_to_suppress=suppressed))
            finalized = super()._generate(sample, prefix_tokens, constraints, bos_token)
        for hypothesis in (hypothesis for beams in finalized for hypothesis in beams):
            hypothesis["tokens"] = words[hypothesis["tokens"]]
        return finalized

    def _check_size(self, size: int) -> None:
        """Each step looks at twice as many words as there are beams, never at padding; sampling at its k best."""
        needed = max(2 * self.beam_size + 1, getattr(self.search, "sampling_topk", 0))
        if size < needed:
            raise ValueError(
                f"this search (--beam {self.beam_size}) needs {needed} candidates and a batch has only {size}: raise "
                "--frequent-candidates"
            )


class CandidateSearchWithAlignment(SequenceGeneratorWithAlignment, CandidateSearch):
    """The same with the alignments of ``--print-alignment``."""


@contextmanager
def _set(target: object, **attributes: object) -> Iterator[None]:
    """Attributes that have other values for a while."""
    before = {name: getattr(target, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(target, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)
