"""Beam search on tensors; its step runs on every device without synchronisation.

B sentences, k hypotheses (rows) per sentence, R = B·k; V words or candidates, T steps, S source positions, n words with
individual penalties.

A step preserves the shapes of all tensors.  For each sentence, a step extends k hypotheses by a word, and ends up to k
hypotheses by the end symbol.  For each extended and each ended hypothesis, the step stores a back-pointer to the
hypothesis's previous row.  After the last step, the search follows the back-pointers to collect the words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor

from fairseq_plugins.common.decoding import Decoding, KeptSentences, StepwiseDecoding, update_state
from fairseq_plugins.vocabulary.candidates import candidate_indices


class BeamState:
    """The state of the search for one batch.

    Args:
        decoding: state of the decoder before the first step.
        rules: token rules of the batch.
        rows: rows per sentence in the first step: k, or 1 to avoid computing k equal rows.
        in_place: whether log-probabilities may overwrite the logits.

    Attributes:
        sentences: indices of the sentences that are not dropped, among all sentences of the batch, (B,).
    """

    def __init__(self, decoding: Decoding, rules: TokenRules, rows: int, in_place: bool = False) -> None:
        self.decoding, self.rules, self.beam, self.in_place = decoding, rules, rules.beam, in_place
        self.fixed = decoding.fixed
        (steps, sentences), device, beam = rules.forced.shape, rules.forced.device, rules.beam
        self.sentences = torch.arange(sentences, device=device)
        self.tokens = torch.full((sentences * rows,), rules.bos, device=device)  # last word of each row
        self.order = torch.arange(0, sentences * beam, beam // rows, device=device)  # previous row of each row
        # The rows of a sentence are equal at first, so only the first row starts with a probability above zero.
        self.totals = torch.full((sentences, rows), -torch.inf, dtype=torch.float32, device=device)
        self.totals[:, 0] = 0
        self.count = torch.zeros(sentences, dtype=torch.long, device=device)  # ended hypotheses
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        # For each step: words of the k extended hypotheses, previous rows of the k extended hypotheses, and previous
        # rows of up to k ended hypotheses.
        self.back_pointers = torch.zeros(steps, sentences, 3 * beam, dtype=torch.long, device=device)
        # For each step: scores of the k extended hypotheses, then scores of up to k ended hypotheses.  Minus infinity
        # marks a place without an ended hypothesis.
        self.scores = torch.full((steps, sentences, 2 * beam), -torch.inf, dtype=torch.float32, device=device)
        self.attention: Tensor | None = None
        if isinstance(decoding, StepwiseDecoding) and self.fixed and decoding.decoder.wants_attention:
            self.attention = self._no_attention(decoding.source.keys.size(1))

    def prepare_and_step(self, step: Callable[[BeamState], None] | None = None) -> None:
        """Allocate memory for a step, and run ``step``, which may be compiled; by default, run `BeamState.step`.

        A search captured as CUDA graphs does not call this method, because it reuses the memory of an earlier batch.
        """
        self.decoding.make_room()
        (step or BeamState.step)(self)

    def step(self) -> None:
        """Extend each hypothesis by a word, or end it."""
        k = self.beam
        forced = self.rules.forced.index_select(0, self.position).squeeze(0).index_select(0, self.sentences)
        best, words = self._best_per_row(forced)
        scores, words, parents = self._best_per_sentence(best, words, forced)
        # Each sentence has 2k best continuations now.  An end symbol among the first k finishes a hypothesis.
        ends = words.eq(self.rules.eos) & scores.ne(-torch.inf)
        ended = scores[:, :k].masked_fill(~ends[:, :k], -torch.inf)
        # The first k continuations that do not end are extended in the next step.
        going = ends.sort(dim=1, stable=True)[1][:, :k]
        totals, tokens, continued = (part.gather(1, going) for part in (scores, words, parents))

        at = self.position, self.sentences
        self.back_pointers.index_put_(at, torch.cat([tokens, continued, parents[:, :k]], dim=1))
        self.scores.index_put_(at, torch.cat([totals, ended], dim=1))
        first = torch.arange(0, len(self.tokens), self.totals.size(1), device=tokens.device).unsqueeze(1)
        count = self.count + ends[:, :k].sum(dim=1)
        update_state(self, tokens=tokens.flatten(), order=(first + continued).flatten(), totals=totals, count=count)
        self.position.add_(1)

    @property
    def finished(self) -> Tensor:
        """Whether each remaining sentence has k finished hypotheses, (B,)."""
        return self.count >= self.beam

    def _best_per_row(self, forced: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and words of the best 2k continuations of each row, (R, 2k) each, best first.

        If there are fewer than 2k words, all are returned.

        Args:
            forced: word that all hypotheses of a sentence must have in this step, or -1 if any word is allowed, (B,).
        """
        rules = self.rules
        features, attention = self.decoding.step(self.tokens, self.order)
        if attention is not None:
            self._store_attention(attention)
        logits = self.decoding.output_layer(features)
        if rules.temperature != 1:
            logits = logits / rules.temperature
        out = logits if self.in_place and logits.dtype == torch.float32 else None
        lprobs = torch.log_softmax(logits, dim=1, dtype=torch.float32, out=out)
        penalise_words(lprobs, rules.word_penalty, rules.eos)
        penalised, penalties = rules.penalised.expand(len(lprobs), -1), rules.penalties.index_select(0, self.position)
        lprobs.scatter_add_(1, penalised, penalties.expand_as(penalised))
        best, words = best_words(lprobs, min(2 * self.beam, lprobs.size(1)))

        forced = forced.unsqueeze(1).expand_as(self.totals).reshape(-1, 1)
        only = torch.full_like(best, -torch.inf)
        only[:, :1] = lprobs.gather(1, forced.clamp(min=0))
        best = only.where(forced >= 0, best)
        words = forced.where(forced >= 0, words)
        if rules.words is not None:
            words = rules.words[words].clamp(min=0)  # if a row is NaN, topk may return any index
        return best.masked_fill(best.isnan(), -torch.inf), words

    def _best_per_sentence(self, best: Tensor, words: Tensor, forced: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return scores, words and previous rows of the best 2k continuations of each sentence, (B, 2k) each."""
        sentences, size = len(self.sentences), best.size(1)
        scores = best.view(sentences, -1, size) + self.totals.unsqueeze(2)
        # If a prefix contains the end symbol, all hypotheses of its sentence are equal, as in fairseq.
        last = self.rules.last_steps.index_select(0, self.sentences)
        copies = (forced.eq(self.rules.eos) & self.position.ne(last)).unsqueeze(1)
        scores = scores[:, :1].where(copies.unsqueeze(2), scores).flatten(1)
        scores, at = scores.topk(min(2 * self.beam, scores.size(1)))
        parents = at.div(size, rounding_mode="floor").masked_fill(copies, 0)
        return scores, words.view(sentences, -1).gather(1, at), parents

    def _store_attention(self, attention: Tensor) -> None:
        """Store the attention of this step, (R, S)."""
        if self.attention is None:
            self.attention = self._no_attention(attention.size(1))
        rows = self.sentences.unsqueeze(1) * self.beam + torch.arange(self.totals.size(1), device=attention.device)
        self.attention.index_put_((self.position, rows.flatten()), attention.type_as(self.attention))

    def _no_attention(self, source_length: int) -> Tensor:
        steps, sentences = self.rules.forced.shape
        return self.totals.new_zeros(steps, sentences * self.beam, source_length)

    def keep(self, places: Tensor) -> None:
        """Keep only the sentences with the indices ``places``; drop the others."""
        self.decoding.keep(KeptSentences(places))
        for name in ("sentences", "totals", "count"):
            setattr(self, name, getattr(self, name).index_select(0, places))
        for name in ("tokens", "order"):
            setattr(self, name, getattr(self, name).view(-1, self.beam).index_select(0, places).flatten())

    def hypotheses(self, steps: int, len_penalty: float) -> list[list[dict[str, Tensor]]]:
        """Return the finished hypotheses of each sentence after ``steps`` steps, best first, in fairseq's format.

        Scores are divided by (length of the hypothesis)^len_penalty.
        """
        words, continued, ended_in = np.split(self.back_pointers[:steps].cpu().numpy(), 3, axis=2)
        totals, ended = np.split(self.scores[:steps].cpu().numpy(), 2, axis=2)
        # A sentence keeps the first k hypotheses that ended, ordered by step and then by rank.
        ends = (ended > -np.inf).swapaxes(0, 1).reshape(ended.shape[1], -1)
        sentence, at = np.nonzero(ends & (ends.cumsum(axis=1) <= self.beam))
        last, rank = np.divmod(at, self.beam)

        # Follow the back-pointers to collect each step's previous row, word, and total score up to this word.
        row = ended_in[last, sentence, rank]
        rows_before, word, total = (np.zeros((len(at), steps), each) for each in (np.int64, np.int64, np.float32))
        every = np.arange(len(at))
        word[every, last], total[every, last] = self.rules.eos, ended[last, sentence, rank]
        for step in reversed(range(steps)):
            inside = np.nonzero(last > step)[0]
            place = step, sentence[inside], row[inside]
            word[inside, step], total[inside, step], row[inside] = words[place], totals[place], continued[place]
            rows_before[:, step] = row
        score = total[every, last] / ((last + 1) ** float(len_penalty)).astype(np.float32)
        total[:, 1:] -= total[:, :-1].copy()

        device = self.back_pointers.device
        tokens, scores, each = (torch.from_numpy(part).to(device) for part in (word, score, total))
        nothing = torch.empty(0)
        attention = [nothing] * len(at)
        if self.attention is not None:
            # Gather the attention of all hypotheses at once, without the steps after a hypothesis has ended.
            index, when = np.nonzero(np.arange(steps) <= last[:, None])
            rows = sentence[index] * self.beam + rows_before[index, when]
            when, rows = torch.from_numpy(np.stack([when, rows])).to(device)
            attention = [part.t() for part in self.attention[when, rows].split((last + 1).tolist())]
        found: list[list[dict[str, Tensor]]] = [[] for _ in ends]
        for i in np.lexsort((-score, sentence)):
            length = last[i] + 1
            found[sentence[i]].append(
                {
                    "tokens": tokens[i, :length],
                    "score": scores[i],
                    "attention": attention[i],
                    "alignment": nothing,
                    "positional_scores": each[i, :length],
                }
            )
        return found


class TokenRules(NamedTuple):
    """The rules that forbid, force or penalise words in a batch.

    If there are candidates, a word is represented by its index in `words`, not by its index in the dictionary.
    """

    penalised: Tensor  # words with individual penalties, (n,)
    penalties: Tensor  # numbers added to the log-probabilities of ``penalised`` in each step, (T, n)
    forced: Tensor  # word that all hypotheses of a sentence must have in each step, or -1 if any is allowed, (T, B)
    last_steps: Tensor  # step in which all hypotheses of a sentence must end, (B,)
    words: Tensor | None  # candidate words, padded with -1, (V,); None for all words
    beam: int  # k
    word_penalty: float  # number added to the log-probability of each word except the end of the sentence
    temperature: float  # divisor of the logits
    eos: int  # end of the sentence
    bos: int  # word before the first target word

    @classmethod
    def from_generator(
        cls,
        generator: SequenceGenerator,
        source: Tensor,
        prefix: Tensor | None = None,
        bos: int | None = None,
        words: Tensor | None = None,
    ) -> TokenRules:
        """Return the rules that a generator's options imply for a batch.

        Args:
            generator: a `FastBeamSearch`.
            source: source tokens, (B, S).
            prefix: first target words of each sentence, padded, (B, P).
            bos: word before the first target word; the end symbol by default.
            words: candidate words, (V,); None for all words.
        """
        longest = min(int(generator.max_len_a * source.size(1) + generator.max_len_b), generator.max_len - 1)
        # fairseq's own assertion has the same message.
        assert generator.min_len <= longest, "min_len cannot be larger than max_len, please adjust these!"
        device, steps, first = source.device, longest + 1, 0
        forced, last_steps = torch.full((steps, len(source)), -1, device=device), generator.last_steps(source, longest)
        if prefix is not None:
            # As in fairseq, suppressed words and the minimum length apply only after the longest prefix of the batch.
            first = min(prefix.size(1), longest)
            own = prefix[:, :first].t()
            forced[:first] = candidate_indices(own.contiguous(), words).masked_fill(own == generator.pad, -1)
        forced.scatter_(0, last_steps.unsqueeze(0), generator.eos)
        penalised = [generator.pad, generator.unk, generator.eos]
        if generator.token_indices_to_suppress is not None:
            penalised += candidate_indices(generator.token_indices_to_suppress.to(device), words).tolist()
        penalties = torch.zeros(steps, len(penalised), dtype=torch.float32)
        penalties[:, 0], penalties[:, 1] = -torch.inf, -generator.unk_penalty
        penalties[first:, 3:] = -torch.inf
        penalties[first : max(generator.min_len, 0), 2] = -torch.inf
        return cls(
            penalised=torch.tensor(penalised, device=device),
            penalties=penalties.to(device),
            forced=forced,
            last_steps=last_steps,
            words=words,
            beam=generator.beam_size,
            word_penalty=generator.word_penalty,
            temperature=generator.temperature,
            eos=generator.eos,
            bos=generator.eos if bos is None else bos,
        )

    def exclude_forced_words(self) -> Tensor:
        """Return, for each sentence, whether a forced word has a penalty of minus infinity, (B,)."""
        excluded = self.penalties.isneginf().unsqueeze(1)
        return self.forced.unsqueeze(2).eq(self.penalised).logical_and(excluded).any(dim=2).any(dim=0)

    def clone(self) -> TokenRules:
        """Return a copy that shares no tensors with this object."""
        parts: Any = (each.clone() if torch.is_tensor(each) else each for each in self)
        return TokenRules(*parts)


def penalise_words(lprobs: Tensor, penalty: float, eos: int) -> None:
    """Add ``penalty`` to the log-probabilities of all words except ``eos``, (R, V), in place (Gehring et al. 2016)."""
    if penalty:
        lprobs += penalty * (torch.arange(lprobs.size(1), device=lprobs.device) != eos)


_BLOCK = 64


def best_words(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count`` best scores of each row and their words, (R, V) -> (R, count) each; see `torch.topk`.

    On a CPU, the maxima of blocks of words are computed first, which is faster than `torch.topk`.  The best ``count``
    words lie in the ``count`` blocks with the largest maxima, or in the incomplete last block, so only these blocks
    need sorting.
    """
    size = scores.size(1)
    blocks = size // _BLOCK
    if scores.device.type != "cpu" or blocks <= 2 * count:
        return scores.topk(count)
    whole = scores[:, : blocks * _BLOCK].unflatten(1, (blocks, _BLOCK))
    kept = whole.amax(dim=2).topk(count, sorted=False)[1].unsqueeze(2)
    words = (kept * _BLOCK + torch.arange(_BLOCK)).flatten(1)
    rest = torch.arange(blocks * _BLOCK, size).expand(len(scores), -1)
    words = torch.cat([words, rest], dim=1)
    best, at = scores.gather(1, words).topk(count)
    return best, words.gather(1, at)
