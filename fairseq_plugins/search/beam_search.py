"""The step of a beam search, the same on every device: tensors only, and no look at a number.

B sentences, k hypotheses (rows) for each, R = B·k; V words or candidates, T steps, S source positions, n words with
rules of their own.

A step changes no shape.  It writes back-pointers, which never move: which word each hypothesis took, which hypothesis
it continued, and which ended.  They are followed once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor

from fairseq_plugins.common.decoding import Decoding, KeptSentences, StepwiseDecoding, update_state
from fairseq_plugins.search.ensemble import penalise_words
from fairseq_plugins.vocabulary.candidates import numbers_among


class BeamState:
    """The search of one batch.

    Args:
        decoding: a decoder before its first step.
        rules: of the batch.
        rows: of each sentence in the first step: k, or one, since they are all alike.
        in_place: whether log-probabilities may overwrite the logits.

    Attributes:
        sentences: those that are left, by their numbers in the batch, (B,).
    """

    def __init__(
        self,
        decoding: Decoding,
        rules: TokenRules,
        rows: int,
        in_place: bool = False,
    ) -> None:
        self.decoding, self.rules, self.beam, self.in_place = decoding, rules, rules.beam, in_place
        self.fixed = decoding.fixed
        (steps, sentences), device, beam = rules.forced.shape, rules.forced.device, rules.beam
        self.sentences = torch.arange(sentences, device=device)
        self.tokens = torch.full((sentences * rows,), rules.bos, device=device)  # the last word of each row
        self.order = torch.arange(0, sentences * beam, beam // rows, device=device)  # which row each continues
        # Only one of a sentence's rows, which are alike, has any probability at first.
        self.totals = torch.full((sentences, rows), -torch.inf, dtype=torch.float32, device=device)
        self.totals[:, 0] = 0
        self.count = torch.zeros(sentences, dtype=torch.long, device=device)  # of hypotheses that have ended
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        # Of each step: words of those that go on, and rows that these continue and others end; and the scores of both.
        self.numbers = torch.zeros(steps, sentences, 3 * beam, dtype=torch.long, device=device)
        self.scores = torch.full((steps, sentences, 2 * beam), -torch.inf, dtype=torch.float32, device=device)
        self.attention: Tensor | None = None
        if isinstance(decoding, StepwiseDecoding) and self.fixed and decoding.decoder.wants_attention:
            self.attention = self._no_attention(decoding.source.keys.size(1))

    def begin_and_step(self, step: Callable[[BeamState], None] | None = None) -> None:
        """`step`, or a program of it, after what the host does before; not where the state is another batch's."""
        self.decoding.make_room()
        (step or BeamState.step)(self)

    def step(self) -> None:
        """All hypotheses grow by a word, or end."""
        k = self.beam
        forced = self.rules.forced.index_select(0, self.position).squeeze(0).index_select(0, self.sentences)
        best, words = self._best_of_rows(forced)
        scores, words, parents = self._best_of_sentences(best, words, forced)
        # Of a sentence's best 2k, of which at most k end, those end that are among the first k...
        ends = words.eq(self.rules.eos) & scores.ne(-torch.inf)
        ended = scores[:, :k].masked_fill(~ends[:, :k], -torch.inf)
        # ... and the first k that do not end go on.
        going = ends.sort(dim=1, stable=True)[1][:, :k]
        totals, tokens, continued = (part.gather(1, going) for part in (scores, words, parents))

        at = self.position, self.sentences
        self.numbers.index_put_(at, torch.cat([tokens, continued, parents[:, :k]], dim=1))
        self.scores.index_put_(at, torch.cat([totals, ended], dim=1))
        first = torch.arange(0, len(self.tokens), self.totals.size(1), device=tokens.device).unsqueeze(1)
        count = self.count + ends[:, :k].sum(dim=1)
        update_state(self, tokens=tokens.flatten(), order=(first + continued).flatten(), totals=totals, count=count)
        self.position.add_(1)

    @property
    def finished(self) -> Tensor:
        """Which of the sentences that are left have k finished hypotheses, (B,)."""
        return self.count >= self.beam

    def _best_of_rows(self, forced: Tensor) -> tuple[Tensor, Tensor]:
        """The log-probabilities of the n best words of each row, the best first, and these words, (R, n) each.

        Args:
            forced: the word that each sentence is to take in this step, or -1, (B,).
        """
        rules = self.rules
        features, attention = self.decoding.step(self.tokens, self.order)
        if attention is not None:
            self._see(attention)
        logits = self.decoding.output_layer(features)
        if rules.temperature != 1:
            logits = logits / rules.temperature
        place = logits if self.in_place and logits.dtype == torch.float32 else None
        lprobs = torch.log_softmax(logits, dim=1, dtype=torch.float32, out=place)
        penalise_words(lprobs, rules.word_penalty, rules.eos)
        ruled, penalties = rules.ruled.expand(len(lprobs), -1), rules.penalties.index_select(0, self.position)
        lprobs.scatter_add_(1, ruled, penalties.expand_as(ruled))
        best, words = best_words(lprobs, min(2 * self.beam, lprobs.size(1)))

        forced = forced.unsqueeze(1).expand_as(self.totals).reshape(-1, 1)
        only = torch.full_like(best, -torch.inf)
        only[:, :1] = lprobs.gather(1, forced.clamp(min=0))
        best = only.where(forced >= 0, best)
        words = forced.where(forced >= 0, words)
        if rules.words is not None:
            words = rules.words[words].clamp(min=0)  # of a row without numbers any word may come out
        return best.masked_fill(best.isnan(), -torch.inf), words

    def _best_of_sentences(self, best: Tensor, words: Tensor, forced: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The up to 2k best of each sentence: scores, words, and which of its rows each continues, (B, 2k) each."""
        sentences, size = len(self.sentences), best.size(1)
        scores = best.view(sentences, -1, size) + self.totals.unsqueeze(2)
        # Where a prefix ends the sentence, all its hypotheses end, as copies of the first: so it is in fairseq.
        last = self.rules.last.index_select(0, self.sentences)
        copies = (forced.eq(self.rules.eos) & self.position.ne(last)).unsqueeze(1)
        scores = scores[:, :1].where(copies.unsqueeze(2), scores).flatten(1)
        scores, at = scores.topk(min(2 * self.beam, scores.size(1)))
        parents = at.div(size, rounding_mode="floor").masked_fill(copies, 0)
        return scores, words.view(sentences, -1).gather(1, at), parents

    def _see(self, attention: Tensor) -> None:
        """Write down what rows attend to in this step, (R, S)."""
        if self.attention is None:
            self.attention = self._no_attention(attention.size(1))
        rows = self.sentences.unsqueeze(1) * self.beam + torch.arange(self.totals.size(1), device=attention.device)
        self.attention.index_put_((self.position, rows.flatten()), attention.type_as(self.attention))

    def _no_attention(self, source_length: int) -> Tensor:
        steps, sentences = self.rules.forced.shape
        return self.totals.new_zeros(steps, sentences * self.beam, source_length)

    def keep(self, places: Tensor) -> None:
        """Go on with the sentences that are now at these places."""
        self.decoding.keep(KeptSentences(places))
        for name in ("sentences", "totals", "count"):
            setattr(self, name, getattr(self, name).index_select(0, places))
        for name in ("tokens", "order"):
            setattr(self, name, getattr(self, name).view(-1, self.beam).index_select(0, places).flatten())

    def hypotheses(self, steps: int, len_penalty: float) -> list[list[dict[str, Tensor]]]:
        """The finished hypotheses of each sentence after so many steps, the best first, as fairseq's generators do.

        Args:
            steps: how many were made.
            len_penalty: the power of its length that a score is divided by.
        """
        words, continued, ended_in = np.split(self.numbers[:steps].cpu().numpy(), 3, axis=2)
        totals, ended = np.split(self.scores[:steps].cpu().numpy(), 2, axis=2)
        # Of each sentence the first k, by step and then by rank.
        ends = (ended > -np.inf).swapaxes(0, 1).reshape(ended.shape[1], -1)
        sentence, at = np.nonzero(ends & (ends.cumsum(axis=1) <= self.beam))
        last, rank = np.divmod(at, self.beam)

        # Back from the end: which row each hypothesis was before a step, its word, and its score after it.
        row = ended_in[last, sentence, rank]
        before, word, total = (np.zeros((len(at), steps), each) for each in (np.int64, np.int64, np.float32))
        everyone = np.arange(len(at))
        word[everyone, last], total[everyone, last] = self.rules.eos, ended[last, sentence, rank]
        for step in reversed(range(steps)):
            inside = np.nonzero(last > step)[0]
            place = step, sentence[inside], row[inside]
            word[inside, step], total[inside, step], row[inside] = words[place], totals[place], continued[place]
            before[:, step] = row
        score = total[everyone, last] / ((last + 1) ** float(len_penalty)).astype(np.float32)
        total[:, 1:] -= total[:, :-1].copy()

        device = self.numbers.device
        tokens, scores, each = (torch.from_numpy(part).to(device) for part in (word, score, total))
        nothing = torch.empty(0)
        attention = [nothing] * len(at)
        if self.attention is not None:
            # Of all in one piece, and of no step beyond their ends.
            which, when = np.nonzero(np.arange(steps) <= last[:, None])
            rows = sentence[which] * self.beam + before[which, when]
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
    """Of one batch; words by their numbers among the candidates, if there are any.

    Attributes:
        ruled: the words whose log-probability is changed, (n,).
        penalties: what is added to it at each step, (T, n).
        forced: the word that all hypotheses of a sentence take at each step, (T, B); where -1, any.
        last: the last step of each sentence, in which its hypotheses end, (B,).
        words: the candidates, (V,), or None where they are all words; where negative there is none.
        beam: k.
        word_penalty: added to the log-probability of each word but the end.
        temperature: logits are divided by it.
        eos: the end.
        bos: the first word.
    """

    ruled: Tensor
    penalties: Tensor
    forced: Tensor
    last: Tensor
    words: Tensor | None
    beam: int
    word_penalty: float
    temperature: float
    eos: int
    bos: int

    @classmethod
    def of(
        cls,
        options: SequenceGenerator,
        source: Tensor,
        prefix: Tensor | None = None,
        bos: int | None = None,
        words: Tensor | None = None,
    ) -> TokenRules:
        """Those that follow for a batch from a generator's options.

        Args:
            options: a `FastBeamSearch`.
            source: (B, S).
            prefix: the first words of each sentence, filled up with padding, (B, P).
            bos: the first word; by default the end.
            words: as above.
        """
        longest = min(int(options.max_len_a * source.size(1) + options.max_len_b), options.max_len - 1)
        assert options.min_len <= longest, "min_len cannot be larger than max_len, please adjust these!"  # fairseq's
        device, steps, first = source.device, longest + 1, 0
        forced, last = torch.full((steps, len(source)), -1, device=device), options.last_steps(source, longest)
        if prefix is not None:
            # Until the longest prefix has ended fairseq suppresses no word, and no end, of any sentence.
            first = min(prefix.size(1), longest)
            own = prefix[:, :first].t()
            forced[:first] = numbers_among(own.contiguous(), words).masked_fill(own == options.pad, -1)
        forced.scatter_(0, last.unsqueeze(0), options.eos)
        ruled = [options.pad, options.unk, options.eos]
        if options.token_indices_to_suppress is not None:
            ruled += numbers_among(options.token_indices_to_suppress.to(device), words).tolist()
        penalties = torch.zeros(steps, len(ruled), dtype=torch.float32)
        penalties[:, 0], penalties[:, 1] = -torch.inf, -options.unk_penalty
        penalties[first:, 3:] = -torch.inf
        penalties[first : max(options.min_len, 0), 2] = -torch.inf
        return cls(
            ruled=torch.tensor(ruled, device=device),
            penalties=penalties.to(device),
            forced=forced,
            last=last,
            words=words,
            beam=options.beam_size,
            word_penalty=options.word_penalty,
            temperature=options.temperature,
            eos=options.eos,
            bos=options.eos if bos is None else bos,
        )

    def clone(self) -> TokenRules:
        """The same elsewhere in memory."""
        parts: Any = (each.clone() if torch.is_tensor(each) else each for each in self)
        return TokenRules(*parts)


_BLOCK = 64


def best_words(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The best of each row, as `torch.topk`: (R, V) to scores and words, (R, count) each.

    On the CPU the best of each block of words is found first, by a pass that is as fast as memory; only the words of
    the best ``count`` blocks can be among the best ``count``.
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
