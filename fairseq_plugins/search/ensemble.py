"""fairseq's models in this plugin's searches, and this plugin's rules in fairseq's searches.

R rows (hypotheses), k for each of B sentences; V target words, S source positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from fairseq.models import BaseFairseqModel
from fairseq.sequence_generator import EnsembleModelWithAlignment
from torch import Tensor

from fairseq_plugins.common.decoding import KeptSentences


class Ensemble(EnsembleModelWithAlignment):
    """fairseq's, with a penalty of words, and with words that are told by their numbers among candidates.

    Args:
        models: of the ensemble.
        word_penalty: added to the log-probability of each word...
        eos: ... but this one.
        words: the candidates, (V,); None for all words.
    """

    def __init__(
        self, models: Sequence[BaseFairseqModel], word_penalty: float, eos: int, words: Tensor | None = None
    ) -> None:
        super().__init__(models)
        self.word_penalty, self.eos, self.words = word_penalty, eos, words

    def forward_decoder(self, tokens: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """As fairseq's: tokens (R, T) to log-probabilities (R, V) and attention."""
        tokens = tokens if self.words is None else self.words[tokens]
        lprobs, attention = super().forward_decoder(tokens, *args, **kwargs)
        penalise_words(lprobs, self.word_penalty, self.eos)
        return lprobs, attention


def penalise_words(lprobs: Tensor, penalty: float, eos: int) -> None:
    """Add the penalty to the log-probability of each word but the end, (R, V), in place."""
    if penalty:
        lprobs += penalty * (torch.arange(lprobs.size(1), device=lprobs.device) != eos)


class FairseqDecoding:
    """A decoder of fairseq's in the middle of a batch; it wants all words so far, and the source once for each row.

    Args:
        model: an encoder-decoder.
        encoder_out: its encoder's result.
        source: (B, S).
        beam: k.
    """

    fixed = False

    def __init__(self, model: Any, encoder_out: Any, source: Tensor, beam: int) -> None:
        self.encoder, self.decoder, self.beam = model.encoder, model.decoder, beam
        rows = torch.arange(len(source) * beam, device=source.device)
        self.encoder_out = self.encoder.reorder_encoder_out(encoder_out, rows.div(beam, rounding_mode="floor"))
        self.words = rows.new_empty(len(rows), 0)
        self.state: dict[str, Any] = {}

    def make_room(self) -> None:
        """The host has nothing to do."""

    def step(self, tokens: Tensor, order: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Logits, (R, V), and attention, (R, S) or None."""
        assert order is not None
        if self.state:
            self.decoder.reorder_incremental_state_scripting(self.state, order)
        self.words = torch.cat([self.words.index_select(0, order), tokens.unsqueeze(1)], dim=1)
        logits, *extra = self.decoder.forward(self.words, encoder_out=self.encoder_out, incremental_state=self.state)
        attention = extra[0] if extra else None
        if isinstance(attention, dict):
            attention = attention["attn"]
        if isinstance(attention, list | tuple):
            attention = attention[0]
        return logits[:, -1], None if attention is None else attention[:, -1]

    def output_layer(self, features: Tensor) -> Tensor:
        """The decoder has done it."""
        return features

    def keep(self, kept: KeptSentences) -> None:
        """Go on with these sentences only."""
        rows = kept.sentences.unsqueeze(1) * self.beam + torch.arange(self.beam, device=kept.sentences.device)
        self.encoder_out = self.encoder.reorder_encoder_out(self.encoder_out, rows.flatten())
