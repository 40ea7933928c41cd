"""Adapters that let this plugin's search run fairseq's models, and fairseq's search use this plugin's options.

B sentences, k hypotheses (rows) per sentence, R = B·k; V target words or candidates, S source positions.
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
    """fairseq's ensemble with a word penalty; with candidates, tokens are indices into `words`.

    Args:
        models: models of the ensemble.
        word_penalty: number added to the log-probability of each word except the end of the sentence.
        eos: end of the sentence.
        words: candidate words, (V,); None for all words.
    """

    def __init__(
        self, models: Sequence[BaseFairseqModel], word_penalty: float, eos: int, words: Tensor | None = None
    ) -> None:
        super().__init__(models)
        self.word_penalty, self.eos, self.words = word_penalty, eos, words

    def forward_decoder(self, tokens: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Return the log-probabilities of the next tokens, (R, V), and the attention, for previous tokens, (R, T)."""
        tokens = tokens if self.words is None else self.words[tokens]
        lprobs, attention = super().forward_decoder(tokens, *args, **kwargs)
        penalise_words(lprobs, self.word_penalty, self.eos)
        return lprobs, attention


def penalise_words(lprobs: Tensor, penalty: float, eos: int) -> None:
    """Add ``penalty`` to the log-probabilities of all words except ``eos``, (R, V), in place."""
    if penalty:
        lprobs += penalty * (torch.arange(lprobs.size(1), device=lprobs.device) != eos)


class FairseqDecoding:
    """A `Decoding` for fairseq's decoders, which read all words so far and a copy of the source per row.

    Args:
        model: encoder-decoder.
        encoder_out: encoder output.
        source: source tokens, (B, S).
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
        """Do nothing: fairseq's decoders allocate memory in each step."""

    def step(self, tokens: Tensor, order: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return logits, (R, V), and attention, (R, S) or None."""
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
        """Return the given features: `step` has already computed logits."""
        return features

    def keep(self, kept: KeptSentences) -> None:
        """Drop all sentences except ``kept``."""
        rows = kept.sentences.unsqueeze(1) * self.beam + torch.arange(self.beam, device=kept.sentences.device)
        self.encoder_out = self.encoder.reorder_encoder_out(self.encoder_out, rows.flatten())
