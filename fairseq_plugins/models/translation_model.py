"""What the models of all families share: how they are built, prepared for translation, and read from checkpoints."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from fairseq.models import FairseqEncoderDecoderModel
from fairseq.tasks import FairseqTask

from fairseq_plugins.models.incremental import IncrementalDecoder, StepwiseDecoding
from fairseq_plugins.models.options import Options
from fairseq_plugins.models.source_encoder import SourceEncoder
from fairseq_plugins.nn.unfilled import unfilled_where_filled_later
from fairseq_plugins.nn.weight_norm import fold_weight_norm_, remove_weight_norm_

__all__ = ["TranslationModel"]

ModelT = TypeVar("ModelT", bound="TranslationModel")


class TranslationModel(FairseqEncoderDecoderModel):
    """An encoder and a decoder of this plugin.

    Attributes:
        family: its name, for errors.
        decoding_class: what its decoder's state is between steps.
        state_version: of the layout of its checkpoints, which it saves as a buffer.
        accelerate_: makes a model, or a part of one, fast, once it is built and again once it will only translate; a
            backend's, which `registration` puts here.
    """

    family: ClassVar[str]
    decoding_class: ClassVar[type[StepwiseDecoding]]
    state_version: ClassVar[int] = 1
    accelerate_: Callable[..., None] = staticmethod(lambda module: None)

    def __init__(self, encoder: SourceEncoder, decoder: IncrementalDecoder) -> None:
        super().__init__(encoder, decoder)
        decoder.decoding_class = self.decoding_class
        self.register_buffer("version", torch.tensor(self.state_version))

    @classmethod
    @abstractmethod
    def build(cls: type[ModelT], cfg: Options, task: FairseqTask) -> ModelT:
        """The model that the options describe, in plain torch.

        Raises:
            ValueError: an option is malformed, or two do not fit together.
        """

    @classmethod
    @unfilled_where_filled_later()
    def build_model(cls: type[ModelT], cfg: Options, task: FairseqTask) -> ModelT:
        """`build` for fairseq, and make it fast.

        Raises:
            ValueError: as of `build`; or targets would begin with padding
                (``--left-pad-target``), which a decoder would read in training and never when it translates.
        """
        if getattr(getattr(task, "cfg", None), "left_pad_target", False):
            raise ValueError(f"{cls.family} takes targets padded on the right: leave out --left-pad-target")
        model = cls.build(cfg, task)
        cls.accelerate_(model)
        return model

    def make_generation_fast_(self, **kwargs: Any) -> None:
        """Prepare for translating: weights are normalised once and for all."""
        super().make_generation_fast_(**kwargs)
        remove_weight_norm_(self)
        self.accelerate_(self)

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
