"""What the decoders of all families share: full decoding for training, and decoding step by step for translation.

B sentences, k hypotheses (rows) for each, R = B·k rows, T target positions, S source positions, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from fairseq.models import FairseqIncrementalDecoder
from torch import Tensor, nn

from fairseq_plugins.models.no_torch_script import NoTorchScript
from fairseq_plugins.nn.decoder_state import KeptSentences, RowOrder
from fairseq_plugins.nn.embedding import InputEmbedding
from fairseq_plugins.nn.selected_rows import selected_rows
from fairseq_plugins.nn.source import Source
from fairseq_plugins.nn.weight_norm import has_weight_norm, without_weight_norm

__all__ = ["IncrementalDecoder", "StepwiseDecoding"]

_STATE = "decoding"
_FIRST_CAPACITY = 16  # steps that there is memory for, where none is given; at least so many are added when it is full


class IncrementalDecoder(NoTorchScript, FairseqIncrementalDecoder):
    """A decoder whose state between steps is one object, a decoding, made anew for each batch.

    Args:
        dictionary: target words.
        embedding: of target words.

    Attributes:
        decoding_class: the family's kind of `StepwiseDecoding`, of its `TranslationModel`; or a backend's form of it.
        output_projection: from features to logits.
    """

    decoding_class: type[StepwiseDecoding]
    output_projection: nn.Linear

    def __init__(self, dictionary: Dictionary, embedding: InputEmbedding) -> None:
        super().__init__(dictionary)
        self.embedding = embedding
        embedding.dropout.module_name = type(self).__name__  # by which --retain-dropout-modules knows it
        self.need_attn = True

    @abstractmethod
    def features(self, g: Tensor, source: Source) -> tuple[Tensor, Tensor | None]:
        """All positions at once, up to `output_layer`: (B, T, width), and the reported attention, (B, T, S) or None.

        Of embeddings g, (B, T, f), and of a source with one entry for each of the B rows.
        """

    def extract_features(
        self, prev_output_tokens: Tensor, encoder_out: Source, **unused: object
    ) -> tuple[Tensor, dict[str, list[Tensor | None]]]:
        """As `forward`, up to `output_layer`: (B, T, width), and the attention."""
        features, attention = self.features(self.embedding(prev_output_tokens), encoder_out.expand())
        return features, {"attn": [attention]}

    def output_layer(self, features: Tensor, **unused: object) -> Tensor:
        """Logits over the vocabulary: (..., width) -> (..., V)."""
        return self.output_projection(features)

    def start(
        self, source: Source, beam: int = 1, capacity: int | None = None, words: Tensor | None = None
    ) -> StepwiseDecoding:
        """The state of a batch before its first step; see `StepwiseDecoding`."""
        return self.decoding_class(self, source, beam, capacity, words)

    def max_positions(self) -> int:
        """Longest target, in tokens."""
        return self.embedding.max_positions

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Source,
        incremental_state: dict[str, Any] | None = None,
        **unused: object,
    ) -> tuple[Tensor, dict[str, list[Tensor | None]]]:
        """Predict each next token.

        Args:
            prev_output_tokens: (B, T), or (R, T) with k rows per sentence; see also `StepwiseDecoding.decode`.
            encoder_out: the encoder's result; steps after the first look at their own state.
            incremental_state: when given, only the tokens that it has not seen are decoded, step by step.

        Returns:
            logits (B, T, V), and under ``"attn"`` the reported attention (B, T, S), or None where nobody looks at it.
        """
        self.refuse_tracing()
        if incremental_state is None:
            features, extra = self.extract_features(prev_output_tokens, encoder_out)
            return self.output_layer(features), extra
        decoding = self.get_incremental_state(incremental_state, _STATE)
        if decoding is None:
            decoding = self.start(*encoder_out.group())
            self.set_incremental_state(incremental_state, _STATE, decoding)
        return decoding.decode(prev_output_tokens)

    @property
    def wants_attention(self) -> bool:
        """Whether anybody may look at the attention: not in training, nor when prepared without it."""
        return self.need_attn and not self.training

    def reorder_incremental_state(self, incremental_state: dict[str, Any], new_order: Tensor) -> None:
        """Row i continues row ``new_order[i]`` from the next step on."""
        decoding = self.get_incremental_state(incremental_state, _STATE)
        if decoding is not None:
            decoding.order.reorder(new_order)

    def make_generation_fast_(self, need_attn: bool = False, **unused: object) -> None:
        """What fairseq tells a model that will only translate from now on."""
        self.need_attn = need_attn


class StepwiseDecoding:
    """A decoding: the state of one batch between steps, and the step itself.

    It lives as long as the batch, so nothing in it outlasts a change of the model's weights.  A step is `begin_step`,
    which is the host's part, and `advance`: the family's `step`, counted on the device.  This plugin's search calls
    these two; under fairseq's own, a decoder's ``forward`` does (`decode`).

    Args:
        decoder: which.
        source: the encoder's result, one entry for each of B sentences.
        beam: k, rows of each sentence.
        capacity: steps to have memory for.  When given, no row will leave, and all tensors of the state keep their
            shapes and places in memory, until there have been so many steps and `grow` has to be called.
        words: when given, the words to predict among, see `selected_rows`; by default all.

    Attributes:
        linear: `F.linear`, or a backend's, for what is multiplied once for a batch; `map_of` is for steps.
        fixed: whether a capacity was given.
        steps: how many the host knows of.
    """

    linear: Callable[..., Tensor] = staticmethod(F.linear)

    @torch.no_grad()
    def __init__(
        self, decoder: IncrementalDecoder, source: Source, beam: int, capacity: int | None, words: Tensor | None
    ) -> None:
        if has_weight_norm(decoder):
            decoder = without_weight_norm(decoder, decoder.dictionary)
        self.decoder = decoder
        self.source = source
        self.fixed = capacity is not None
        self.capacity = _FIRST_CAPACITY if capacity is None else capacity
        self.order = RowOrder(len(source.keys) * beam, beam)
        self.steps = 0
        self.position = torch.zeros(1, dtype=torch.long, device=source.keys.device)  # steps, as the device knows them
        projection = decoder.output_projection
        if words is not None:
            projection = selected_rows(projection, words)
        self.output_layer = self.map_of(projection.weight, projection.bias)
        self.set_up()

    @abstractmethod
    def set_up(self) -> None:
        """What a batch computes once, of plain weights and of the source, and the state before the first step."""

    def map_of(self, weight: Tensor, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
        """The map ``x -> x Wᵀ + b`` for all steps, with the weight, (O, K), as it is now, which backends lay out."""
        return partial(F.linear, weight=weight, bias=bias)

    @abstractmethod
    def step(self, tokens: Tensor, order: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """One step, which looks at no number on the device.

        Args:
            tokens: one for each row, (R,): the k rows of a sentence, or in the first step one for each sentence.
            order: which row of the step before each row continues, of the same shape; None when nothing moved.

        Returns:
            features (R, width) and the reported attention, (R, S) or None.
        """

    def keep(self, kept: KeptSentences) -> None:
        """Go on with these sentences only, which the next order is of."""
        self.source = self.source.select(kept.sentences)

    def grow(self, steps: int) -> None:
        """Make room for so many more steps, where steps add to the state."""
        self.capacity += steps

    def advance(self, tokens: Tensor, order: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """`step`, and on to the next position."""
        result = self.step(tokens, order)
        self.position.add_(1)
        return result

    def begin_step(self) -> None:
        """What the host does before each step: it counts it, and makes room for it.

        Raises:
            ValueError: the step lies beyond the model's positions.
        """
        self.decoder.embedding.check_length(self.steps + 1)
        if self.steps == self.capacity:
            self.grow(self.capacity if self.fixed else max(_FIRST_CAPACITY, self.capacity // 4))
        self.steps += 1

    @torch.no_grad()
    def decode(self, prev_output_tokens: Tensor) -> tuple[Tensor, dict[str, list[Tensor | None]]]:
        """Decode the tokens that have not been seen yet, as fairseq wants it.

        Args:
            prev_output_tokens: (R, T), all tokens so far.

        Returns:
            logits (R, n, V) for the n new tokens and, as ``"attn"``, their attention (R, n, S) or None.

        Raises:
            ValueError: there is no new token, a token lies beyond the model's positions, or there are as many rows as
                do not fit the encoder's result.
        """
        length = prev_output_tokens.size(1)
        if length <= self.steps:
            raise ValueError(
                f"{self.steps} tokens of each row have been decoded and {length} are given; pass all tokens so far"
            )
        rows, left, k = len(prev_output_tokens), self.order.left, self.order.beam
        if rows != left:
            raise ValueError(f"{rows} target rows for an encoder's output of {left // k} x {k} rows")
        features, attention = [], []
        for step in range(self.steps, length):
            self.begin_step()
            order, kept = self.order.take_pending()
            if kept is not None:
                self.keep(kept)
            x, a = self.advance(prev_output_tokens[:, step], order)
            features.append(x)
            attention.append(a)
        logits = self.output_layer(torch.stack(features, dim=1))
        return logits, {"attn": [None if a is None else torch.stack(attention, dim=1)]}  # type: ignore[arg-type]

    def by_sentence(self, x: Tensor) -> Tensor:
        """(R, ...) -> (B, k, ...), without a copy."""
        return x.view(len(self.source.keys), -1, x.size(-1))
