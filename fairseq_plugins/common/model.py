"""The base classes of all families: encoder, decoder, and the model that is built of them.

B sentences, k hypotheses (rows) for each, R = B·k rows, T target positions, S source positions, V vocabulary.
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
from fairseq_plugins.cpu.packing import BatchPacking

ModelT = TypeVar("ModelT", bound="TranslationModel")

_STATE = "decoding"


class NoTorchScript:
    """A part of a model that `torch.export` takes whole, and that refuses to become TorchScript.

    TorchScript supports neither the keyword arguments that fairseq passes nor the custom operators here, and its own
    errors name some inner line.
    """

    def refuse_tracing(self) -> None:
        """Call this at the start of `forward`.

        Raises:
            NotImplementedError: the call is traced, as `torch.jit.trace` and torch's older exporter to ONNX do.
        """
        if torch.jit.is_tracing():  # type: ignore[attr-defined]
            self._refuse()

    def _refuse(self, **unused: object) -> NoReturn:
        raise NotImplementedError(
            f"{type(self).__name__} cannot become TorchScript, nor ONNX by way of it: "
            "use torch.export.export(model, (src_tokens, None, prev_output_tokens), strict=False) under torch.no_grad()"
        )

    __prepare_scriptable__ = _refuse  # torch.jit.script asks for this first
    prepare_for_onnx_export_ = _refuse  # fairseq's scripts ask for this before they export


class SourceEncoder(NoTorchScript, FairseqEncoder):
    """An encoder of B sentences of up to S tokens.

    Args:
        dictionary: source words.
        embedding: embeddings e of words and positions.
    """

    def __init__(self, dictionary: Dictionary, embedding: InputEmbedding) -> None:
        super().__init__(dictionary)
        self.padding_idx = dictionary.pad()
        self.embedding = embedding
        embedding.dropout.module_name = type(self).__name__  # by which --retain-dropout-modules knows it

    @abstractmethod
    def encode(self, e: Tensor, padding_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Encode embeddings (B, S, f), with true at padding (B, S), to keys and values, each (B, S, width)."""

    def forward(self, src_tokens: Tensor, src_lengths: Tensor | None = None, **unused: object) -> Source:
        """Encode a batch.

        Args:
            src_tokens: (B, S), padded on either side.
            src_lengths: not used; the padding says the same.

        Raises:
            ValueError: a sentence is longer than `max_positions`.
        """
        self.refuse_tracing()
        padding_mask = src_tokens.eq(self.padding_idx)
        keys, values = self.encode(self.embedding(src_tokens), padding_mask)
        return Source(keys, values, padding_mask)

    def reorder_encoder_out(self, encoder_out: Source, new_order: Tensor) -> Source:
        """Return the rows in a new order; fairseq expands sentences to beams this way."""
        return encoder_out.reorder(new_order)

    def max_positions(self) -> int:
        """Return the longest source, in tokens."""
        return self.embedding.max_positions


class IncrementalDecoder(NoTorchScript, FairseqIncrementalDecoder):
    """A decoder whose state between steps is one object, a `StepwiseDecoding`, made for each batch.

    Args:
        dictionary: target words.
        embedding: of target words.

    Attributes:
        decoding_class: the family's `StepwiseDecoding`.
        output_projection: from features to logits.
        packing: packed weights of a batch, in a twin made by `with_packing`.
    """

    decoding_class: ClassVar[type[StepwiseDecoding]]
    output_projection: nn.Linear
    packing: BatchPacking | None = None

    def __init__(self, dictionary: Dictionary, embedding: InputEmbedding) -> None:
        super().__init__(dictionary)
        self.embedding = embedding
        embedding.dropout.module_name = type(self).__name__  # by which --retain-dropout-modules knows it
        self.need_attn = True

    @abstractmethod
    def features(self, g: Tensor, source: Source) -> tuple[Tensor, Tensor | None]:
        """Compute all positions at once, up to `output_layer`.

        Args:
            g: embeddings of the previous target words, (B, T, f).
            source: one entry for each of the B rows.

        Returns:
            features (B, T, width), and the reported attention, (B, T, S) or None.
        """

    @abstractmethod
    def attention_modules(self) -> dict[int, nn.Module]:
        """Return the modules that attend to the source, by the number of their layer from 1, for pictures.

        The attention of a module is what its method ``weights`` returns for the module's inputs, (B, h, T, S); without
        such a method, the module's second output, (B, T, S).
        """

    def extract_features(
        self, prev_output_tokens: Tensor, encoder_out: Source, **unused: object
    ) -> tuple[Tensor, dict[str, list[Tensor | None]]]:
        """As `forward`, up to `output_layer`: (B, T, width), and the attention."""
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
        packing: BatchPacking | None = None,
    ) -> StepwiseDecoding:
        """Return the state of a batch before its first step; see `StepwiseDecoding`."""
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
            encoder_out: the encoder's result; steps after the first look at their own state.
            incremental_state: if given, only the tokens that it has not seen are decoded, step by step.

        Returns:
            logits (B, T, V), and under ``"attn"`` the reported attention (B, T, S), or None if it is not wanted.
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
        """Whether the attention is reported: not in training, nor in a model prepared without it."""
        return self.need_attn and not self.training

    def reorder_incremental_state(self, incremental_state: dict[str, Any], new_order: Tensor) -> None:
        """Row i continues row ``new_order[i]`` from the next step on."""
        decoding = self.get_incremental_state(incremental_state, _STATE)
        if decoding is not None:
            decoding.order.reorder(new_order)

    def make_generation_fast_(self, need_attn: bool = False, **unused: object) -> None:
        """Prepare for translation; fairseq says whether attention is reported."""
        self.need_attn = need_attn


class TranslationModel(FairseqEncoderDecoderModel):
    """An encoder and a decoder of this plugin.

    Attributes:
        family: its name, for errors.
        shortest_warmup: in updates, for own-data.
        onnx_program: module with the family's ``encode``, ``set_up`` and ``step`` as ONNX operators, and ``PARTS``,
            the classes that these compute; not inherited, for a derived model may compute something else.
        converters: for each model of fairseq whose checkpoints can become this family's, the module with ``convert``,
            from the one checkpoint to the other.
        state_version: of the layout of its checkpoints, which it saves as a buffer.
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
        """As fairseq's, after `fairseq_plugins.install`: no checkpoint is loaded without the repairs."""
        fairseq_plugins.install()
        return super().from_pretrained(*args, **kwargs)

    @classmethod
    @abstractmethod
    def build(cls: type[ModelT], cfg: Options, task: FairseqTask) -> ModelT:
        """Return the model that the options describe.

        Raises:
            ValueError: an option is malformed, or two do not fit together.
        """

    @classmethod
    def build_model(cls: type[ModelT], cfg: Options, task: FairseqTask) -> ModelT:
        """`build` for fairseq.

        Raises:
            ValueError: as of `build`; or targets would begin with padding
                (``--left-pad-target``), which a decoder would read in training and never when it translates.
        """
        if getattr(getattr(task, "cfg", None), "left_pad_target", False):
            raise ValueError(f"--left-pad-target: {cls.family} needs targets padded on the right; leave it out")
        return cls.build(cfg, task)

    @classmethod
    def training_options(cls, warmup: int) -> str:
        """Return the options of fairseq-train with which own-data trains: criterion, optimizer and schedule.

        The rate falls as 0.04 / sqrt(updates), as in examples/multi30k, after so many updates of warm-up.
        """
        return (
            "--criterion label_smoothed_cross_entropy --optimizer adam --adam-betas (0.9,0.98) "
            f"--lr {0.04 / warmup**0.5:.2g} --lr-scheduler inverse_sqrt --warmup-updates {warmup}"
        )

    @classmethod
    def usual_epochs(cls, pairs: int) -> float:
        """Return the number of epochs that own-data usually takes with so many sentence pairs; infinity if unknown."""
        return math.inf

    def make_generation_fast_(self, **kwargs: Any) -> None:
        """Prepare for translation: replace normalised weights by their values, for good."""
        super().make_generation_fast_(**kwargs)
        remove_weight_norm_(self)

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> None:
        """Make a checkpoint fit this model, also one of training a model that is prepared to translate.

        Raises:
            ValueError: the checkpoint was written by a newer version than this one.
        """
        super().upgrade_state_dict_named(state_dict, name)
        found = int(state_dict.get("version", self.state_version))
        if found > self.state_version:
            raise ValueError(
                f"the checkpoint has the layout of version {found} of the {self.family} models, and this code knows "
                f"{self.state_version}; a newer fairseq_plugins will load it"
            )
        fold_weight_norm_(state_dict, self)
