"""What a search forbids, forces or penalises, as tensors: so batches with other options take the same program.

B sentences, T steps, V candidates, n words with rules of their own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor

from fairseq_plugins.vocabulary.candidates import numbers_among


class Rules(NamedTuple):
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
    ) -> Rules:
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

    def clone(self) -> Rules:
        """The same elsewhere in memory."""
        parts: Any = (each.clone() if torch.is_tensor(each) else each for each in self)
        return Rules(*parts)
