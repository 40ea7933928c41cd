"""What is mended in fairseq's search."""

from __future__ import annotations

import torch
from fairseq.ngram_repeat_block import NGramRepeatBlock

import fairseq_plugins

fairseq_plugins.install()


def test_repeated_ngrams_are_blocked_in_the_generators_buffer() -> None:
    """Against the same tokens in a tensor of their own length; fairseq's own looks at the padding behind them."""
    block, tokens = NGramRepeatBlock(3, use_extension=False), torch.tensor([[2, 5, 6, 7, 5, 6], [2, 5, 6, 7, 6, 5]])
    buffer = torch.cat([tokens, torch.ones(2, 4, dtype=torch.long)], dim=1)
    alone, inside = (block(given, torch.zeros(2, 9), bsz=1, beam_size=2, step=5) for given in (tokens, buffer))
    assert torch.equal(inside, alone)
    assert (inside == float("-inf")).nonzero().tolist() == [[0, 7]]  # 5 6 7 again
    words = NGramRepeatBlock(1, use_extension=False)(buffer, torch.zeros(2, 9), bsz=1, beam_size=2, step=5)
    assert (words == float("-inf")).nonzero().tolist() == [[row, word] for row in (0, 1) for word in (5, 6, 7)]
    prefix = torch.full((2, 9), -torch.inf)
    prefix[:, 6] = -1
    assert torch.equal(NGramRepeatBlock(1, use_extension=False)(buffer, prefix, bsz=1, beam_size=2, step=5), prefix)
