"""Differentiable log-probabilities of several target sentences per source sentence.

Each source sentence is encoded only once.

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

_BATCHES = 4  # number of batches that hypotheses are divided into, by length


class Rows(NamedTuple):
    """Target sentences to score; the first B are the references.

    Attributes:
        tokens: tokens of each row, including the end.
        sentences: index of each row's source sentence.
        first: token before the first target token, for each source sentence.
    """

    tokens: Sequence[Sequence[int]]
    sentences: Sequence[int]
    first: Sequence[int]


class RowScores(NamedTuple):
    """The log-probabilities of rows.

    Attributes:
        tokens: log-probability of each token, (R, T); zero after the end of a row.
        sums: log-probabilities at each position of the references, summed over the vocabulary, (B, T); zero after the
            end of a reference.
        words: size of the vocabulary, V.
    """

    tokens: Tensor
    sums: Tensor
    words: int


def score_rows(
    model: Any, net_input: dict[str, Any], rows: Rows, padding: int, candidates: Tensor | None = None
) -> RowScores:
    """Return the log-probabilities of rows.

    This calls the model's encoder and decoder, but not the model itself, whose `forward` may be replaced.  A decoder
    with a method `features_of_prefixes` computes each distinct prefix once, so rows with a common prefix also share a
    dropout mask.  Other decoders read batches of rows with similar lengths.

    Args:
        model: encoder-decoder without wrappers for distributed training.
        net_input: source tokens and lengths.
        rows: rows to score.
        padding: padding index.
        candidates: candidate words that the model predicts, (V,); None for all words.
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
    """Return the parts of `RowScores`, computed by a decoder that reads a copy of the source for each row."""
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
