"""Base classes of all model families: encoder, decoder and model.

B sentences, k hypotheses (rows) per sentence, R = B·k rows, T target positions, S source positions, V vocabulary.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import torch
from fairseq.data import Dictionary
from fairseq.models import FairseqEncoder, FairseqEncoderDecoderModel, FairseqIncrementalDecoder
from fairseq.tasks import FairseqTask
from torch import Tensor, nn

import fairseq_plugins
from fairseq_plugins.common.decoding import StepwiseDecoding
from fairseq_plugins.common.embedding import InputEmbedding
from fairseq_plugins.common.options import Options
from fairseq_plugins.common.source import Source
from fairseq_plugins.common.weight_norm import Linear, fold_weight_norm_, remove_weight_norm_
from fairseq_plugins.cpu.packing import BatchWeights

ModelT = TypeVar("ModelT", bound="TranslationModel")

_STATE = "decoding"


class SourceEncoder(FairseqEncoder):
    """An encoder for B sentences of up to S tokens."""

    def __init__(self, dictionary: Dictionary, embedding: InputEmbedding) -> None:
        super().__init__(dictionary)
        self.padding_idx = dictionary.pad()
        self.embedding = embedding
        embedding.dropout.module_name = type(self).__name__  # for --retain-dropout-modules

    @abstractmethod
    def encode(self, e: Tensor, padding_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Compute keys and values, (B, S, width) each, from embeddings, (B, S, f), and a padding mask, (B, S)."""

    def forward(self, src_tokens: Tensor, src_lengths: Tensor | None = None, **unused: object) -> Source:
        """Encode a batch, (B, S), padded on either side; padding determines the lengths."""
        padding_mask = src_tokens.eq(self.padding_idx)
        keys, values = self.encode(self.embedding(src_tokens), padding_mask)
        return Source(keys, values, padding_mask)

    def reorder_encoder_out(self, encoder_out: Source, new_order: Tensor) -> Source:
        """Return the encoder output with rows in a new order; fairseq also calls this method to repeat sentences."""
        return encoder_out.reorder(new_order)

    def max_positions(self) -> int:
        """Return the maximum number of source tokens."""
        return self.embedding.max_positions


class IncrementalDecoder(FairseqIncrementalDecoder):
    """A decoder whose state between steps is one object per batch, a `StepwiseDecoding`.

    Attributes:
        decoding_class: subclass of `StepwiseDecoding` for this decoder.
        output_projection: linear map from features to logits.
        batch_weights: packed weights of the current batch; set by `with_batch_weights`.
    """

    decoding_class: ClassVar[type[StepwiseDecoding]]
    output_projection: Linear
    batch_weights: BatchWeights | None = None

    def __init__(self, dictionary: Dictionary, embedding: InputEmbedding) -> None:
        super().__init__(dictionary)
        self.embedding = embedding
        embedding.dropout.module_name = type(self).__name__  # for --retain-dropout-modules
        self.need_attn = True

    @abstractmethod
    def features(self, g: Tensor, source: Source) -> tuple[Tensor, Tensor | None]:
        """Compute the features of all positions, which are the input of `output_layer`.

        Args:
            g: embeddings of the previous target words, (B, T, f).
            source: encoder output, one entry per row.

        Returns:
            Features (B, T, width), and the attention to report, (B, T, S) or None, see `wants_attention`.
        """

    @abstractmethod
    def attention_modules(self) -> dict[int, nn.Module]:
        """Return the modules that attend to the source, keyed by layer number (from 1); plot-attention needs them.

        A module's method ``weights`` has the inputs of ``forward``, and returns the attention, (B, h, T, S).  If a
        module has no method ``weights``, the attention, (B, T, S), is the second output of ``forward``.
        """

    def extract_features(
        self, prev_output_tokens: Tensor, encoder_out: Source, **unused: object
    ) -> tuple[Tensor, dict[str, list[Tensor | None]]]:
        """Return the features of all positions, (B, T, width), and the attention, in the form that fairseq expects."""
        features, attention = self.features(self.embedding(prev_output_tokens), encoder_out.expand())
        return features, {"attn": [attention]}

    def output_layer(self, features: Tensor, **unused: object) -> Tensor:
        """Return logits over the vocabulary, (..., width) -> (..., V)."""
        return self.output_projection(features)

    def start(
        self,
        source: Source,
        beam: int = 1,
        capacity: int | None = None,
        words: Tensor | None = None,
        batch_weights: BatchWeights | None = None,
    ) -> StepwiseDecoding:
        """Return the initial decoding state of a batch; see `StepwiseDecoding`."""
        return self.decoding_class(self, source, beam, capacity, words, batch_weights or self.batch_weights)

    def max_positions(self) -> int:
        """Return the maximum number of target tokens."""
        return self.embedding.max_positions

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Source,
        incremental_state: dict[str, Any] | None = None,
        **unused: object,
    ) -> tuple[Tensor, dict[str, list[Tensor | None]]]:
        """Predict the token after each of the previous tokens, (B, T), or (R, T) with k rows per sentence.

        With an incremental state of fairseq, only tokens since the last call are decoded, and only the first call reads
        the encoder output.

        Returns:
            Logits, (B, T, V), and a dictionary that holds the attention, (B, T, S) or None, as ``"attn"``.
        """
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
        """Whether `features` should return the attention: true in evaluation mode if ``need_attn`` is true."""
        return self.need_attn and not self.training

    def reorder_incremental_state(self, incremental_state: dict[str, Any], new_order: Tensor) -> None:
        """Set the order of the next step: row i of the next step continues the current row ``new_order[i]``."""
        decoding = self.get_incremental_state(incremental_state, _STATE)
        if decoding is not None:
            decoding.order.reorder(new_order)

    def make_generation_fast_(self, need_attn: bool = False, **unused: object) -> None:
        """Prepare the decoder for inference; ``need_attn`` says whether fairseq needs the attention."""
        self.need_attn = need_attn


class TranslationModel(FairseqEncoderDecoderModel):
    """The base class of this plugin's encoder-decoder models.

    Attributes:
        family: name of the model family, for error messages.
        warmup_epochs: number of epochs of warm-up when the command own-data trains the model.
        shortest_warmup: minimum number of warm-up updates in own-data.
        onnx_program: name of the module that builds the ONNX programs.  The module's functions ``encode``, ``set_up``
            and ``step`` add operators to the programs, and its ``PARTS`` lists the classes that can be exported.
            A subclass can be exported only if the subclass itself sets ``onnx_program``, because a subclass may compute
            a different function.
        converters: names of fairseq models, each mapped to the name of a module.  The module's function ``convert``
            converts checkpoints of the fairseq model to checkpoints of this family.
        state_version: version of the checkpoint layout, saved as a buffer.
    """

    family: ClassVar[str]
    warmup_epochs: ClassVar[float] = 1
    shortest_warmup: ClassVar[int] = 400
    onnx_program: ClassVar[str]
    converters: ClassVar[Mapping[str, str]] = {}
    state_version: ClassVar[int] = 1

    def __init__(self, encoder: SourceEncoder, decoder: IncrementalDecoder) -> None:
        super().__init__(encoder, decoder)
        decoder.output_projection.reuse_memory = True
        self.register_buffer("version", torch.tensor(self.state_version))

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Call `fairseq_plugins.install`, then load a model with fairseq's ``from_pretrained``."""
        fairseq_plugins.install()
        return super().from_pretrained(*args, **kwargs)

    @classmethod
    @abstractmethod
    def build(cls: type[ModelT], cfg: Options, task: FairseqTask) -> ModelT:
        """Return the model for the given options.

        Raises:
            ValueError: options are malformed or incompatible.
        """

    @classmethod
    def build_model(cls: type[ModelT], cfg: Options, task: FairseqTask) -> ModelT:
        """Refuse targets padded on the left, then call `build`; fairseq calls this method."""
        if getattr(getattr(task, "cfg", None), "left_pad_target", False):
            raise ValueError(f"--left-pad-target: {cls.family} needs targets padded on the right; remove the option")
        return cls.build(cfg, task)

    @classmethod
    def training_options(cls, warmup: int) -> str:
        """Return the options that the command own-data passes to fairseq-train: criterion, optimizer and schedule.

        After warm-up the learning rate is 0.04 / sqrt(updates), as in examples/multi30k.
        """
        return (
            "--criterion label_smoothed_cross_entropy --optimizer adam --adam-betas (0.9,0.98) "
            f"--lr {0.04 / warmup**0.5:.2g} --lr-scheduler inverse_sqrt --warmup-updates {warmup}"
        )

    @classmethod
    def usual_epochs(cls, pairs: int, dropout: float) -> float:
        """Return the epoch in which the validation loss of own-data is usually lowest, or infinity if it is unknown."""
        return math.inf

    def make_generation_fast_(self, **kwargs: Any) -> None:
        """Prepare the model for inference: replace normalised weights by their values."""
        super().make_generation_fast_(**kwargs)
        remove_weight_norm_(self)

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> None:
        """Adapt a checkpoint to this model; a model without weight normalisation also accepts normalised weights."""
        super().upgrade_state_dict_named(state_dict, name)
        found = int(state_dict.get("version", self.state_version))
        if found > self.state_version:
            raise ValueError(
                f"the checkpoint has layout version {found} of {self.family}, and this code supports up to "
                f"{self.state_version}: install a newer fairseq_plugins"
            )
        fold_weight_norm_(state_dict, self)
