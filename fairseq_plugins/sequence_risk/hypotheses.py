"""Hypotheses of a model in training: their generation, and their differentiable log-probabilities.

Each source sentence is encoded only once to score all its hypotheses.

B source sentences, R rows (target sentences), T target positions, M prefixes, V target words.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from fairseq.models import BaseFairseqModel, FairseqEncoderDecoderModel
from fairseq.search import Sampling, Search
from fairseq.tasks import FairseqTask
from torch import Tensor, nn

from fairseq_plugins.common.prefix_tree import PrefixTree
from fairseq_plugins.cpu.packing import PackedWeightCache
from fairseq_plugins.search.generator import FastBeamSearch

# (a, b) of the maximum length a·m + b for a source of m tokens, as in the paper.
_MAX_LENGTH = 1.5, 5

_MIN_LPROB = -80.0  # exp of this number is still positive in float32


class HypothesisGenerator:
    """Generate up to ``count`` hypotheses per sentence, by beam search or by sampling.

    The generator samples if ``sampling`` is true and the model is in training mode; otherwise it uses beam search.  If
    the task is `translation_fast`, the task determines the candidate words and the precision.
    """

    def __init__(self, task: FairseqTask, count: int, sampling: bool) -> None:
        self.task, self.count, self.sampling = task, count, sampling
        self._weight_cache = PackedWeightCache(str(getattr(getattr(task, "cfg", None), "cpu_dtype", "float32")))

    def generate(self, model: FairseqEncoderDecoderModel, sample: dict[str, Any]) -> list[list[list[int]]]:
        """Return the hypotheses of each sentence, best first, as tokens including the end.

        Dropout is off, as in the paper.  The model is in its previous mode afterwards.  Sampling may return equal
        hypotheses.
        """
        samples = self.sampling and model.training
        with _evaluating(model):
            # Build a generator for each batch, because each call can get another model, and because the choice between
            # beam search and sampling depends on the model's mode.
            generator = _Search(
                [model],
                self.task.target_dictionary,
                weight_cache=self._weight_cache,
                candidates=getattr(self.task, "candidates", None),
                beam_size=self.count,
                search_strategy=_Sampling(self.task.target_dictionary) if samples else None,
                max_len_a=_MAX_LENGTH[0],
                max_len_b=_MAX_LENGTH[1],
            )
            # The task's `inference_step` would return nothing for blank sources.
            found = generator.generate([model], sample)
        return [[hypothesis["tokens"].tolist() for hypothesis in hypotheses] for hypotheses in found]


def _last_steps(lengths: Tensor) -> Tensor:
    """Return the step in which hypotheses must end, for sources with the given lengths."""
    return (_MAX_LENGTH[0] * lengths + _MAX_LENGTH[1]).long()


class _Search(FastBeamSearch):
    """A search whose length limit depends on each sentence's own source, not on the longest source of the batch."""

    search: Search

    def __init__(self, models: Sequence[BaseFairseqModel], dictionary: Dictionary, **options: Any) -> None:
        super().__init__(models, dictionary, **options)
        if not self._is_plain_beam_search():
            self.search, self.should_set_src_lengths = _LimitedLength(self.search, dictionary), True

    def last_steps(self, source: Tensor, longest: int) -> Tensor:
        """Return the last step of each sentence, in which its hypotheses are forced to end, (B,)."""
        return _last_steps(source.ne(self.pad).sum(dim=1)).clamp(max=longest)


class _LimitedLength(Search):
    """A wrapper that adds the length limits of `_Search` to a search strategy of fairseq."""

    def __init__(self, search: Search, dictionary: Dictionary) -> None:
        super().__init__(dictionary)
        self.search = search

    def step(self, step: int, lprobs: Tensor, *args: Any) -> Any:
        """Choose words by log-probabilities, (B, k, V); a sentence that has reached its limit can only end."""
        words = torch.arange(lprobs.size(2), device=lprobs.device) != self.eos
        over = step >= _last_steps(self.src_lengths).to(lprobs.device)
        return self.search.step(step, lprobs.masked_fill(over.view(-1, 1, 1) & words, -math.inf), *args)


class _Sampling(Sampling):
    """fairseq's sampling with rescaled log-probabilities.

    If only the end symbol is allowed and its probability is very low, the probability is rounded to zero, and
    fairseq's sampling fails.  Rescaling avoids this.
    """

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


_BATCHES = 4  # number of batches that hypotheses are divided into, by length


class Rows(NamedTuple):
    """Target sentences to score; the first B are the references."""

    tokens: Sequence[Sequence[int]]  # tokens of each row, including the end
    sentences: Sequence[int]  # index of each row's source sentence
    first: Sequence[int]  # token before the first target token, for each source sentence


class RowScores(NamedTuple):
    """The log-probabilities of rows; they are zero after the end of a row."""

    tokens: Tensor  # log-probability of each token, (R, T)
    sums: Tensor  # log-probabilities at each position of the references, summed over the vocabulary, (B, T)
    words: int  # V


def score_rows(
    model: Any, net_input: dict[str, Any], rows: Rows, padding: int, candidates: Tensor | None = None
) -> RowScores:
    """Return the log-probabilities of rows.

    The function calls the model's encoder and decoder, not the model itself, because the model's `forward` may be
    replaced.  A decoder with a method `features_of_prefixes` computes each distinct prefix once, so rows with a common
    prefix also share a dropout mask.  Other decoders read batches of rows with similar lengths.  If candidate words,
    (V,), are given, the model predicts only candidate words.
    """
    device = net_input["src_tokens"].device
    encoder_out = model.encoder.forward_torchscript(net_input)
    length = max(map(len, rows.tokens))
    tokens = torch.tensor([[*row, *[padding] * (length - len(row))] for row in rows.tokens], device=device)
    real = tokens.ne(padding)
    targets = tokens if candidates is None else torch.searchsorted(candidates, tokens)
    if hasattr(model.decoder, "features_of_prefixes"):
        tree = PrefixTree(rows.tokens, rows.sentences, rows.first, device)
        features = model.decoder.features_of_prefixes(tree, encoder_out)
        lprobs = model.get_normalized_probs((model.decoder.output_layer(features), None), log_probs=True)
        scores, references = lprobs[tree.nodes, targets], tree.nodes[: len(rows.first)]
        sums = lprobs.index_select(0, references.flatten()).sum(dim=1).view_as(references)
        words = lprobs.size(1)
    else:
        scores, sums, words = _score_in_batches(model, encoder_out, rows, tokens, targets)
    return RowScores(scores.masked_fill(~real, 0), sums.masked_fill(~real[: len(sums)], 0), words)


def _score_in_batches(
    model: Any, encoder_out: Any, rows: Rows, tokens: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor, int]:
    """Return the fields of `RowScores`; the decoder reads a copy of the encoder's output for each row."""
    references, device = len(rows.first), tokens.device
    sentences = torch.tensor(rows.sentences, device=device)
    first = torch.tensor(rows.first, device=device).index_select(0, sentences)
    previous = torch.cat([first.unsqueeze(1), tokens[:, :-1]], dim=1)
    hypotheses = sorted(range(references, len(tokens)), key=lambda row: len(rows.tokens[row]))
    size = max(1, math.ceil(len(hypotheses) / _BATCHES))
    scores, sums, words = [], tokens.new_empty(0), 0
    for batch in (list(range(references)), *(hypotheses[i : i + size] for i in range(0, len(hypotheses), size))):
        chosen, length = torch.tensor(batch, device=device), max(len(rows.tokens[row]) for row in batch)
        # fairseq's fconv re-orders the encoder output in place, so pass a shallow copy.
        source = model.encoder.reorder_encoder_out(copy.copy(encoder_out), sentences.index_select(0, chosen))
        net_output = model.decoder(previous.index_select(0, chosen)[:, :length], encoder_out=source)
        lprobs = model.get_normalized_probs(net_output, log_probs=True)
        found = lprobs.gather(2, targets.index_select(0, chosen)[:, :length].unsqueeze(2)).squeeze(2)
        scores.append(F.pad(found, (0, tokens.size(1) - length)))
        if not words:
            sums, words = F.pad(lprobs.sum(dim=2), (0, tokens.size(1) - length)), lprobs.size(2)
    order = torch.tensor([*range(references), *hypotheses], device=device).argsort()
    return torch.cat(scores).index_select(0, order), sums, words
