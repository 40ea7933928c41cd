"""Log-probabilities, with gradients, of several target sentences of each source sentence, which is encoded once.

B source sentences, R rows (target sentences), T target positions, M prefixes, V target words.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_plugins.common.prefix_tree import PrefixTree

_PACKS = 4  # rows of about one length are decoded together, in so many batches


class Rows(NamedTuple):
    """Target sentences, the first B of which are the references.

    Attributes:
        tokens: the words of each, with the end.
        sentences: the source sentence of each.
        first: the word in front of the first, of each source sentence.
    """

    tokens: Sequence[Sequence[int]]
    sentences: Sequence[int]
    first: Sequence[int]


class RowScores(NamedTuple):
    """What a loss needs of the probabilities.

    Attributes:
        tokens: log-probability of each word, (R, T); zero beyond a row's end.
        sums: of the log-probabilities of all words, at each word of the B references, (B, T); zero beyond their ends.
        words: V.
    """

    tokens: Tensor
    sums: Tensor
    words: int


def score_rows(
    model: Any, net_input: dict[str, Any], rows: Rows, padding: int, vocabulary: Tensor | None = None
) -> RowScores:
    """Score the rows; within it the model's encoder and decoder are called, and not the model.

    A decoder of this plugin that can does so for each prefix once, however many rows begin with it; prefixes that are
    one have one dropout.  Others decode rows of about one length together.

    Args:
        model: an encoder-decoder, which nothing wraps.
        net_input: the batch.
        rows: what to score.
        padding: the padding symbol.
        vocabulary: the words that the model predicts among, if not all, (V,).
    """
    device = net_input["src_tokens"].device
    encoder_out = model.encoder.forward_torchscript(net_input)
    length = max(map(len, rows.tokens))
    tokens = torch.tensor([[*row, *[padding] * (length - len(row))] for row in rows.tokens], device=device)
    real = tokens.ne(padding)
    wanted = tokens if vocabulary is None else torch.searchsorted(vocabulary, tokens)
    if hasattr(model.decoder, "features_of_prefixes"):
        tree = PrefixTree(rows.tokens, rows.sentences, rows.first, device)
        features = model.decoder.features_of_prefixes(tree, encoder_out)
        lprobs = model.get_normalized_probs((model.decoder.output_layer(features), None), log_probs=True)
        scores, references = lprobs[tree.nodes, wanted], tree.nodes[: len(rows.first)]
        sums = lprobs.index_select(0, references.flatten()).sum(dim=1).view_as(references)
        words = lprobs.size(1)
    else:
        scores, sums, words = _in_packs(model, encoder_out, rows, tokens, wanted)
    return RowScores(scores.masked_fill(~real, 0), sums.masked_fill(~real[: len(sums)], 0), words)


def _in_packs(model: Any, encoder_out: Any, rows: Rows, tokens: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, int]:
    """The source copied for each row: scores (R, T), sums of the references (B, T) and V."""
    references, device = len(rows.first), tokens.device
    sentences = torch.tensor(rows.sentences, device=device)
    first = torch.tensor(rows.first, device=device).index_select(0, sentences)
    previous = torch.cat([first.unsqueeze(1), tokens[:, :-1]], dim=1)
    candidates = sorted(range(references, len(tokens)), key=lambda row: len(rows.tokens[row]))
    size = max(1, math.ceil(len(candidates) / _PACKS))
    scores, sums, words = [], tokens.new_empty(0), 0
    for pack in (list(range(references)), *(candidates[i : i + size] for i in range(0, len(candidates), size))):
        chosen, length = torch.tensor(pack, device=device), max(len(rows.tokens[row]) for row in pack)
        # fairseq's fconv re-orders in place.
        source = model.encoder.reorder_encoder_out(copy.copy(encoder_out), sentences.index_select(0, chosen))
        net_output = model.decoder(previous.index_select(0, chosen)[:, :length], encoder_out=source)
        lprobs = model.get_normalized_probs(net_output, log_probs=True)
        found = lprobs.gather(2, wanted.index_select(0, chosen)[:, :length].unsqueeze(2)).squeeze(2)
        scores.append(F.pad(found, (0, tokens.size(1) - length)))
        if not words:
            sums, words = F.pad(lprobs.sum(dim=2), (0, tokens.size(1) - length)), lprobs.size(2)
    order = torch.tensor([*range(references), *candidates], device=device).argsort()
    return torch.cat(scores).index_select(0, order), sums, words
