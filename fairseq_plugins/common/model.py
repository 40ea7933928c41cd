"""Base classes of all families: encoder, decoder and model.

B sentences, k hypotheses (rows) per sentence, R = B·k rows, T target positions, S source positions, V vocabulary.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
from fairseq.data import Dictionary
from fairseq.models import FairseqEncoder, FairseqEncoderDecoderModel, FairseqIncrementalDecoder
from fairseq.tasks import FairseqTask
from torch import Tensor, nn

import fairseq_plugins
from fairseq_plugins.common.decoding import StepwiseDecoding
from fairseq_plugins.common.embedding import InputEmbedding
from fairseq_plugins.common.linear import fold_weight_norm_, remove_weight_norm_
from fairseq_plugins.common.options import Options
from fairseq_plugins.common.source import Source
from fairseq_plugins.cpu.packing import BatchWeights

ModelT = TypeVar("ModelT", bound="TranslationModel")

_STATE = "decoding"


class NoTorchScript:
    """A mixin for modules that support `torch.export` but not TorchScript.

    TorchScript supports neither the keyword arguments that fairseq passes nor the custom operators here, and its errors
    are hard to understand.
    """

    def refuse_tracing(self) -> None:
        """Call this at the start of `forward`.

        Raises:
            NotImplementedError: the call is traced, by `torch.jit.trace` or torch's older ONNX exporter.
        """
        if torch.jit.is_tracing():  # type: ignore[attr-defined]
            self._refuse()

    def _refuse(self, **unused: object) -> NoReturn:
        raise NotImplementedError(
            f"{type(self).__name__} does not support TorchScript, nor ONNX export through it: use "
            "torch.export.export(model, (src_tokens, None, prev_output_tokens), strict=False) under torch.no_grad()"
        )

    __prepare_scriptable__ = _refuse  # called by torch.jit.script
    prepare_for_onnx_export_ = _refuse  # called by fairseq's export scripts


class SourceEncoder(NoTorchScript, FairseqEncoder):
    """An encoder for B sentences of up to S tokens.

    Args:
        dictionary: source words.
        embedding: embeddings e of words and positions.
    """

    def __init__(self, dictionary: Dictionary, embedding: InputEmbedding) -> None:
        super().__init__(dictionary)
        self.padding_idx = dictionary.pad()
        self.embedding = embedding
        embedding.dropout.module_name = type(self).__name__  # for --retain-dropout-modules

    @abstractmethod
    def encode(self, e: Tensor, padding_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Encode embeddings (B, S, f), with a mask that is true at padding (B, S), to keys and values (B, S, width)."""

    def forward(self, src_tokens: Tensor, src_lengths: Tensor | None = None, **unused: object) -> Source:
        """Encode a batch.

        Args:
            src_tokens: (B, S), padded on either side.
            src_lengths: unused; padding determines the lengths.

        Raises:
            ValueError: a sentence is longer than `max_positions`.
        """
        self.refuse_tracing()
        padding_mask = src_tokens.eq(self.padding_idx)
        keys, values = self.encode(self.embedding(src_tokens), padding_mask)
        return Source(keys, values, padding_mask)

    def reorder_encoder_out(self, encoder_out: Source, new_order: Tensor) -> Source:
        """Return the rows in a new order, which fairseq uses to expand sentences to beams."""
        return encoder_out.reorder(new_order)

    def max_positions(self) -> int:
        """Return the longest source, in tokens."""
        return self.embedding.max_positions


class IncrementalDecoder(NoTorchScript, FairseqIncrementalDecoder):
    """A decoder whose state between steps is one object per batch, a `StepwiseDecoding`.

    Args:
        dictionary: target words.
        embedding: embeddings of target words and positions.

    Attributes:
        decoding_class: `StepwiseDecoding` of the family.
        output_projection: linear map from features to logits.
        packing: packed weights of a batch, set in a copy made by `with_packing`.
    """

    decoding_class: ClassVar[type[StepwiseDecoding]]
    output_projection: nn.Linear
    packing: BatchWeights | None = None

    def __init__(self, dictionary: Dictionary, embedding: InputEmbedding) -> None:
        super().__init__(dictionary)
        self.embedding = embedding
        embedding.dropout.module_name = type(self).__name__  # for --retain-dropout-modules
        self.need_attn = True

    @abstractmethod
    def features(self, g: Tensor, source: Source) -> tuple[Tensor, Tensor | None]:
        """Compute the features of all positions, the input of `output_layer`.

        Args:
            g: embeddings of the previous target words, (B, T, f).
            source: encoder output, one entry per row.

        Returns:
            Features (B, T, width), and the reported attention, (B, T, S) or None.
        """

    @abstractmethod
    def attention_modules(self) -> dict[int, nn.Module]:
        """Return the modules that attend to the source by layer number, from 1; used by plot-attention.

        The attention of a module is the result of its method ``weights`` for the module's inputs, (B, h, T, S), or
        without this method its second output, (B, T, S).
        """

    def extract_features(
        self, prev_output_tokens: Tensor, encoder_out: Source, **unused: object
    ) -> tuple[Tensor, dict[str, list[Tensor | None]]]:
        """Return the features of all positions, (B, T, width), and the attention, for fairseq."""
        features, attention = self.features(self.embedding(prev_output_tokens), encoder_out.expand())
        return features, {"attn": [attention]}

    def output_layer(self, features: Tensor, **unused: object) -> Tensor:
        """Return logits over the vocabulary: (..., width) -> (..., V)."""
        return self.output_projection(features)

    def start(
        self,
        source: Source,
        beam: int = 1,
        capacity: int | None = None,
        words: Tensor | None = None,
        packing: BatchWeights | None = None,
    ) -> StepwiseDecoding:
        """Return the initial decoding state of a batch; see `StepwiseDecoding`."""
        return self.decoding_class(self, source, beam, capacity, words, packing or self.packing)

    def max_positions(self) -> int:
        """Return the longest target, in tokens."""
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
            encoder_out: encoder output; used in the first step only if there is an incremental state.
            incremental_state: fairseq's state; if given, only new tokens are decoded, step by step.

        Returns:
            Logits (B, T, V), and under ``"attn"`` the reported attention (B, T, S) or None.
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
        """Whether attention is reported: not in training, and not in a model prepared without it."""
        return self.need_attn and not self.training

    def reorder_incremental_state(self, incremental_state: dict[str, Any], new_order: Tensor) -> None:
        """Let row i continue row ``new_order[i]`` from the next step on."""
        decoding = self.get_incremental_state(incremental_state, _STATE)
        if decoding is not None:
            decoding.order.reorder(new_order)

    def make_generation_fast_(self, need_attn: bool = False, **unused: object) -> None:
        """Prepare for inference; fairseq decides whether attention is reported."""
        self.need_attn = need_attn


class TranslationModel(FairseqEncoderDecoderModel):
    """An encoder-decoder model of this plugin.

    Attributes:
        family: name of the family, for errors.
        shortest_warmup: minimum number of warm-up updates in own-data.
        onnx_program: module with ``encode``, ``set_up`` and ``step`` as ONNX operators, and ``PARTS``, the classes that
            they compute; not inherited, because a subclass may compute something else.
        converters: module with ``convert`` for each fairseq model whose checkpoints can be converted to this family.
        state_version: version of the checkpoint layout, saved as a buffer.
    """

    family: ClassVar[str]
    shortest_warmup: ClassVar[int] = 400
    onnx_program: ClassVar[str]
    converters: ClassVar[Mapping[str, str]] = {}
    state_version: ClassVar[int] = 1

    def __init__(self, encoder: SourceEncoder, decoder: IncrementalDecoder) -> None:
        super().__init__(encoder, decoder)
        self.register_buffer("version", torch.tensor(self.state_version))

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Call `fairseq_plugins.install`, and load a model like fairseq's ``from_pretrained``."""
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
        """Call `build` for fairseq.

        Raises:
            ValueError: see `build`; or ``--left-pad-target`` is given: the decoder would read padding first in
                training, and never in translation.
        """
        if getattr(getattr(task, "cfg", None), "left_pad_target", False):
            raise ValueError(f"--left-pad-target: {cls.family} needs targets padded on the right; remove the option")
        return cls.build(cfg, task)

    @classmethod
    def training_options(cls, warmup: int) -> str:
        """Return own-data's options of fairseq-train: criterion, optimizer and schedule.

        After warm-up the rate is 0.04 / sqrt(updates), as in examples/multi30k.
        """
        return (
            "--criterion label_smoothed_cross_entropy --optimizer adam --adam-betas (0.9,0.98) "
            f"--lr {0.04 / warmup**0.5:.2g} --lr-scheduler inverse_sqrt --warmup-updates {warmup}"
        )

    @classmethod
    def usual_epochs(cls, pairs: int) -> float:
        """Return the usual number of epochs in own-data for a number of sentence pairs; infinity if unknown."""
        return math.inf

    def make_generation_fast_(self, **kwargs: Any) -> None:
        """Prepare for inference: replace normalised weights by their values permanently."""
        super().make_generation_fast_(**kwargs)
        remove_weight_norm_(self)

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> None:
        """Adapt a checkpoint to this model, also a training checkpoint to a model prepared for inference.

        Raises:
            ValueError: the checkpoint was written by a newer version of this plugin.
        """
        super().upgrade_state_dict_named(state_dict, name)
        found = int(state_dict.get("version", self.state_version))
        if found > self.state_version:
            raise ValueError(
                f"the checkpoint has layout version {found} of {self.family}, and this code supports up to "
                f"{self.state_version}: install a newer fairseq_plugins"
            )
        fold_weight_norm_(state_dict, self)
