"""fairseq's beam search without what is wasted in it.

B sentences, k hypotheses (rows) for each, R = B·k, V target words, T target positions, S source positions.

At every step fairseq's generator looks for NaN in the scores of all words, adds each hypothesis's score to all of its
words, finds the best 2k among k·V of them, and once a sentence has ended moves all that is known of the others.  Here a
hypothesis brings its 2k best words, found block by block, and only these meet; sentences that have ended leave gaps,
which the last ones fill.  The host looks at the device once in a step, for the hypotheses that have ended, and at last
for their scores.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models import BaseFairseqModel, FairseqDecoder
from fairseq.models.transformer import TransformerModelBase
from fairseq.search import BeamSearch
from fairseq.sequence_generator import (
    EnsembleModel,
    EnsembleModelWithAlignment,
    SequenceGenerator,
    SequenceGeneratorWithAlignment,
)
from torch import Tensor

from fairseq_plugins.generation.best_words import best_words
from fairseq_plugins.generation.compiled_steps import CompiledSteps
from fairseq_plugins.models.incremental import IncrementalDecoder
from fairseq_plugins.nn.packing import Packing

__all__ = ["Ensemble", "FastBeamSearch", "FastBeamSearchWithAlignment"]

logger = logging.getLogger(__name__)

_SOFTMAX_OF_MODELS = (BaseFairseqModel.get_normalized_probs, TransformerModelBase.get_normalized_probs)


class FastBeamSearch(SequenceGenerator):
    """fairseq's generator; beam search with one model it does itself, and all else as fairseq does.

    Args:
        models: the ensemble.
        tgt_dict: target words.
        packing: of the models' weights; by default in float32.
        compiled: what compiles the steps of this plugin's decoders, if they are to be compiled.
        word_penalty: added to the log-probability of each word but the end (Gehring et al. 2016, section 4.4), in nats.
        options: fairseq's.
    """

    def __init__(
        self,
        models: Sequence[BaseFairseqModel] | EnsembleModel,
        tgt_dict: Dictionary,
        packing: Packing | None = None,
        compiled: CompiledSteps | None = None,
        word_penalty: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(Ensemble(models.models if isinstance(models, EnsembleModel) else models), tgt_dict, **options)
        self.packing = packing or Packing()
        self.compiled = compiled
        self.model.word_penalty, self.model.eos = word_penalty, self.eos
        if compiled and not (self._is_plain() and isinstance(self.model.single_model.decoder, IncrementalDecoder)):
            logger.warning("steps are not compiled: that is for plain beam search with one model of this plugin")

    def _generate(
        self,
        sample: dict[str, Any],
        prefix_tokens: Tensor | None = None,
        constraints: Tensor | None = None,
        bos_token: int | None = None,
    ) -> list[list[dict[str, Tensor]]]:
        """As fairseq's."""
        with self.packing.for_batch():
            net_input = sample["net_input"]
            if prefix_tokens is None and constraints is None and "src_tokens" in net_input and self._is_plain():
                return self._beam_search(net_input, self.eos if bos_token is None else bos_token)
            return super()._generate(sample, prefix_tokens, constraints, bos_token)

    def _is_plain(self) -> bool:
        """Whether this is beam search over the softmax of one model's logits, and nothing else."""
        return (
            type(self.search) is BeamSearch
            and self.model.models_size == 1
            and self.lm_model is None
            and self.repeat_ngram_blocker is None
            and not self.match_source_len
            and 2 * self.beam_size < self.vocab_size
            and self.model.has_encoder()
            and self.model.has_incremental_states()
            and _has_plain_softmax(self.model.single_model)
        )

    def _beam_search(self, net_input: dict[str, Any], bos: int) -> list[list[dict[str, Tensor]]]:
        source = net_input["src_tokens"]
        longest = min(int(self.max_len_a * source.size(1) + self.max_len_b), self.max_len - 1)
        assert self.min_len <= longest, "min_len cannot be larger than max_len, please adjust these!"  # fairseq's words
        k = self.beam_size
        beams = _Beams(source, k, longest, bos)
        encoded = self.model.forward_encoder(net_input)
        states: list[dict[str, Any]] = [{}]
        decoder = self.model.single_model.decoder
        is_own = isinstance(decoder, IncrementalDecoder)
        if self.compiled is not None and is_own:
            decoding = self.compiled.start(decoder, encoded[0], k, steps=longest + 1)
            if decoding is not None:
                decoder.begin(states[0], decoding)
                beams.keeps_all = True
        encoded = self.model.reorder_encoder_out(encoded, torch.arange(len(beams.tokens), device=source.device) // k)
        for step in range(longest + 1):
            tokens = beams.tokens[:, : step + 1]
            if step == 0 and is_own and not beams.keeps_all:
                tokens = tokens[::k]
            logits, attention = self.model.forward_logits(tokens, encoded, states)
            if step == 0 and len(logits) == len(beams.tokens):  # rows of a sentence are alike
                logits, attention = logits[::k], None if attention is None else attention[::k]
            beams.see(step, attention)
            if self.temperature != 1:
                logits = logits / self.temperature
            # In place, as memory of such a size is slow on a processor; logits of other decoders may be needed later.
            is_free = is_own and logits.device.type == "cpu" and logits.dtype == torch.float32
            lprobs = torch.log_softmax(logits, dim=1, dtype=torch.float32, out=logits if is_free else None)
            self.model.add_penalty(lprobs)
            scores, words = self._best_words(lprobs, step, ends=step == longest)
            scores, words, parents = beams.meet(step, scores, words)
            is_end = words.eq(self.eos) & scores.ne(-torch.inf)
            ended = is_end[:, :k].tolist()
            beams.end(step, ended, scores, parents, self.eos, self.len_penalty if self.normalize_scores else 0)
            stay = beams.unfinished()
            if not stay or step == longest:
                break
            rows = beams.go_on(step, stay, scores, words, parents, is_end)
            self.model.reorder_incremental_state(states, rows)
            if len(stay) < len(ended):
                encoded = self.model.reorder_encoder_out(encoded, rows)
        if not all(beams.finished):
            raise RuntimeError(
                "a sentence has no translation: all words are forbidden, or their scores are not numbers"
            )
        return beams.ranked()

    def _best_words(self, lprobs: Tensor, step: int, ends: bool) -> tuple[Tensor, Tensor]:
        """Log-probabilities and words that each hypothesis may go on with, the best first, (R, n) each.

        Args:
            lprobs: of all words, (R, V); overwritten.
            step: which.
            ends: whether all hypotheses have to end.
        """
        lprobs[:, self.pad] = -torch.inf
        lprobs[:, self.unk] -= self.unk_penalty
        if step < self.min_len:
            lprobs[:, self.eos] = -torch.inf
        if self.token_indices_to_suppress is not None:
            lprobs[:, self.token_indices_to_suppress] = -torch.inf
        if ends:
            best = lprobs[:, self.eos : self.eos + 1]
            words = torch.full(best.shape, self.eos, device=best.device)
        else:
            best, words = best_words(lprobs, 2 * self.beam_size)
        return best.masked_fill(best.isnan(), -torch.inf), words


class FastBeamSearchWithAlignment(SequenceGeneratorWithAlignment, FastBeamSearch):
    """The same with the alignments of ``--print-alignment``."""


class _Beams:
    """What a beam search knows of its sentences: those in the batch, k rows for each, and those that have finished.

    Args:
        source: (B, S).
        beam: k.
        longest: steps before the last one, in which every hypothesis ends.
        bos: first word.

    Attributes:
        keeps_all: whether sentences that have finished stay in the batch.
    """

    keeps_all = False

    def __init__(self, source: Tensor, beam: int, longest: int, bos: int) -> None:
        self.beam = beam
        self.numbers = list(range(len(source)))  # which sentence each k rows are of
        self.finished: list[list[dict[str, Tensor]]] = [[] for _ in self.numbers]
        rows = len(source) * beam
        self.tokens = source.new_empty(rows, longest + 2)
        self.tokens[:, 0] = bos
        self.totals = torch.zeros(rows, longest + 1, device=source.device)
        self.attention: Tensor | None = None  # (R, T, S)

    def see(self, step: int, attention: Tensor | None) -> None:
        """The attention of this step, (R, S) or at first (B, S), if the model reports it."""
        if attention is None:
            return
        if self.attention is None:
            self.attention = self.totals.new_zeros(*self.totals.shape, attention.size(1))
        self.attention[:, step] = attention if step else attention.repeat_interleave(self.beam, dim=0)

    def meet(self, step: int, scores: Tensor, words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The up to 2k best of a sentence, from the n best words of each of its rows, (R, n) or at first (B, n).

        Returns:
            scores, words and which of its rows each continues, (B, 2k) each, the best first.
        """
        size = scores.size(1)
        if step:
            scores = scores + self.totals[:, step - 1 : step]
        scores = scores.view(len(self.numbers), -1)
        scores, at = scores.topk(min(2 * self.beam, scores.size(1)))
        return scores, words.view(len(self.numbers), -1).gather(1, at), at.div(size, rounding_mode="floor")

    def end(
        self, step: int, ended: list[list[bool]], scores: Tensor, parents: Tensor, eos: int, len_penalty: float
    ) -> None:
        """Finish the hypotheses that end among the k best, up to k of a sentence."""
        places: list[int] = []
        columns: list[int] = []
        for place, row in enumerate(ended):
            which = [column for column, end in enumerate(row) if end]
            which = which[: self.beam - len(self.finished[self.numbers[place]])]
            places += [place] * len(which)
            columns += which
        if not places:
            return
        at = torch.tensor([places, columns], device=scores.device).unbind()
        rows = at[0] * self.beam + parents[at]
        tokens = self.tokens[rows, 1 : step + 2]
        tokens[:, step] = eos
        totals = self.totals[rows, : step + 1]
        totals[:, step] = scores[at]
        each = totals.clone()
        each[:, 1:] -= totals[:, :-1]
        attention = torch.empty(len(rows), 0)
        if self.attention is not None:
            attention = self.attention[rows, : step + 1].transpose(1, 2)
        final = totals[:, step] / (step + 1) ** len_penalty
        for i, place in enumerate(places):
            self.finished[self.numbers[place]].append(
                {
                    "tokens": tokens[i],
                    "score": final[i],
                    "attention": attention[i],
                    "alignment": torch.empty(0),
                    "positional_scores": each[i],
                }
            )

    def ranked(self) -> list[list[dict[str, Tensor]]]:
        """The finished hypotheses of each sentence, the best first."""
        scores = iter(torch.stack([each["score"] for each in chain(*self.finished)]).tolist())
        scored = [[(next(scores), hypothesis) for hypothesis in each] for each in self.finished]
        return [[hypothesis for _, hypothesis in sorted(each, key=lambda pair: -pair[0])] for each in scored]

    def unfinished(self) -> list[int]:
        """The places of the sentences to go on with; gaps are filled from the end.

        A GPU, which computes a few more rows in the same time, goes on with all until half of them have finished.
        """
        stay = [place for place, number in enumerate(self.numbers) if len(self.finished[number]) < self.beam]
        if stay and (self.keeps_all or (self.tokens.device.type != "cpu" and 2 * len(stay) > len(self.numbers))):
            return list(range(len(self.numbers)))
        kept = set(stay)
        return [place if place in kept else stay.pop() for place in range(len(stay))]

    def go_on(
        self, step: int, stay: list[int], scores: Tensor, words: Tensor, parents: Tensor, is_end: Tensor
    ) -> Tensor:
        """Continue the sentences at these places with the k best words that do not end; the row before each, (R,)."""
        if len(stay) < len(self.numbers):
            places = torch.tensor(stay, device=scores.device)
            self.numbers = [self.numbers[place] for place in stay]
            scores, words, parents, is_end = (part[places] for part in (scores, words, parents, is_end))
        else:
            places = torch.arange(len(stay), device=scores.device)
        rank = is_end * is_end.size(1) + torch.arange(is_end.size(1), device=scores.device)
        chosen = rank.topk(self.beam, largest=False)[1]
        rows = (places.unsqueeze(1) * self.beam + parents.gather(1, chosen)).flatten()
        self.tokens = _move(self.tokens, rows, step + 1)
        self.tokens[:, step + 1] = words.gather(1, chosen).flatten()
        self.totals = _move(self.totals, rows, step)
        self.totals[:, step] = scores.gather(1, chosen).flatten()
        if self.attention is not None:
            self.attention = _move(self.attention, rows, step + 1)
        return rows


def _move(past: Tensor, rows: Tensor, length: int) -> Tensor:
    """``past`` (R, T, ...), of which so many columns are filled, in the new order, in its own memory."""
    past[: len(rows), :length] = past[rows, :length]
    return past[: len(rows)]


class Ensemble(EnsembleModelWithAlignment):
    """fairseq's, which also gives the logits of its only model.

    Attributes:
        words: when not None, words are told by their numbers among these, (n,).
        word_penalty: what the search wants to be added to the log-probability of each word...
        eos: ... but this one.
    """

    words: Tensor | None = None
    word_penalty: float
    eos: int

    def forward_decoder(self, tokens: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """As fairseq's: tokens (R, T) to log-probabilities (R, V) and attention."""
        lprobs, attention = super().forward_decoder(self._spelled_out(tokens), *args, **kwargs)
        self.add_penalty(lprobs)
        return lprobs, attention

    def add_penalty(self, lprobs: Tensor) -> None:
        """The word penalty, in place, (R, V)."""
        if self.word_penalty:
            end = lprobs[:, self.eos].clone()
            lprobs += self.word_penalty
            lprobs[:, self.eos] = end

    def forward_logits(
        self, tokens: Tensor, encoded: list[Any], states: list[dict[str, Any]]
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens (R, T) to the logits of the next words (R, V) and its attention (R, S), or None."""
        logits, *extra = self.single_model.decoder.forward(
            self._spelled_out(tokens), encoder_out=encoded[0], incremental_state=states[0]
        )
        attention = extra[0] if extra else None
        if isinstance(attention, dict):
            attention = attention["attn"]
        if isinstance(attention, list | tuple):
            attention = attention[0]
        return logits[:, -1], None if attention is None else attention[:, -1]

    def _spelled_out(self, tokens: Tensor) -> Tensor:
        return tokens if self.words is None else self.words[tokens]


def _has_plain_softmax(model: BaseFairseqModel) -> bool:
    """Whether the model's probabilities are the softmax of what its decoder returns, by fairseq's own methods."""
    decoder = model.decoder
    return (
        decoder.adaptive_softmax is None
        and type(model).get_normalized_probs in _SOFTMAX_OF_MODELS
        and type(decoder).get_normalized_probs is FairseqDecoder.get_normalized_probs
        and type(decoder).get_normalized_probs_scriptable is FairseqDecoder.get_normalized_probs_scriptable
    )
