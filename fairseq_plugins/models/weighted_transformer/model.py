"""Weighted Transformer Network for Machine Translation (Ahmed et al. 2017, arXiv 1711.02132)."""

from __future__ import annotations

import math
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models import register_model
from fairseq.tasks import FairseqTask
from torch import Tensor, nn

from fairseq_plugins.models.options import Options
from fairseq_plugins.models.translation_model import TranslationModel
from fairseq_plugins.models.weighted_transformer.config import BRANCH_WEIGHTS, WeightedTransformerConfig, complete
from fairseq_plugins.models.weighted_transformer.decoder import WeightedTransformerDecoder
from fairseq_plugins.models.weighted_transformer.encoder import WeightedTransformerEncoder
from fairseq_plugins.models.weighted_transformer.stepwise import WeightedTransformerDecoding
from fairseq_plugins.nn.embedding import InputEmbedding
from fairseq_plugins.nn.initialisation import normal_embedding
from fairseq_plugins.nn.simplex import SimplexVector, check_simplex

__all__ = ["WeightedTransformerModel"]


@register_model("weighted_transformer", dataclass=WeightedTransformerConfig)
class WeightedTransformerModel(TranslationModel):
    """A Transformer whose heads are weighted branches, each with its own part of the feed-forward network."""

    family = "weighted_transformer"
    decoding_class = WeightedTransformerDecoding
    state_version = 2

    def __init__(
        self, encoder: WeightedTransformerEncoder, decoder: WeightedTransformerDecoder, branch_weights: str
    ) -> None:
        super().__init__(encoder, decoder)
        self._calls = 0
        # Not to be averaged: fairseq's moving average leaves out what is called a version.
        self.branch_weights_version: Tensor
        self.register_buffer("branch_weights_version", torch.tensor(BRANCH_WEIGHTS.index(branch_weights)))

    @classmethod
    def build(cls, cfg: Options, task: FairseqTask) -> WeightedTransformerModel:
        """As of `TranslationModel`.

        Raises:
            ValueError: two options do not fit together, or embeddings cannot be shared.
        """
        complete(cfg)
        dim, sharing = cfg.encoder_embed_dim, str(cfg.share_embeddings)

        def word_embedding(dictionary: Dictionary) -> nn.Embedding:
            return normal_embedding(len(dictionary), dim, dictionary.pad(), std=dim**-0.5)

        target_words = word_embedding(task.target_dictionary)
        if sharing != "all":
            source_words = word_embedding(task.source_dictionary)
        elif task.source_dictionary == task.target_dictionary:
            source_words = target_words
        else:
            raise ValueError(
                "source and target have different dictionaries, so their embeddings cannot be one: make the data with "
                "fairseq-preprocess --joined-dictionary, or use --share-embeddings decoder"
            )
        output_projection = nn.Linear(dim, len(task.target_dictionary), bias=False)
        if sharing == "none":
            nn.init.normal_(output_projection.weight, mean=0, std=dim**-0.5)
        else:
            output_projection.weight = target_words.weight

        def embedding(side: str, words: nn.Embedding, max_positions: int) -> InputEmbedding:
            return InputEmbedding(
                words,
                max_positions=max_positions,
                positions="learned" if getattr(cfg, f"{side}_learned_pos") else "sinusoidal",
                dropout=cfg.dropout,
                scale=math.sqrt(dim),
            )

        source = embedding("encoder", source_words, cfg.max_source_positions)
        target = embedding("decoder", target_words, cfg.max_target_positions)
        encoder = WeightedTransformerEncoder(cfg, task.source_dictionary, source)
        decoder = WeightedTransformerDecoder(cfg, task.target_dictionary, target, output_projection)
        return cls(encoder, decoder, str(cfg.branch_weights))

    def train(self, mode: bool = True) -> WeightedTransformerModel:
        """Before validation and translation, see that κ and α are where the optimizer has to keep them.

        So that a wrong optimizer shows early, also in the calls 1, 2, 4, 8 and so on, of which fairseq's trainer makes
        two or more for each update: to look is to wait for the device.

        Raises:
            ValueError: they are not.
        """
        self._calls += mode
        if self.training and not (mode and self._calls & (self._calls - 1)):
            check_simplex(self)
        super().train(mode)
        return self

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> None:
        """Make a checkpoint fit this model.

        Where the model was asked for other branch weights than the checkpoint was trained with (``--model-overrides
        "{'branch_weights': 'uniform'}"``), it keeps its own.

        Raises:
            ValueError: the checkpoint was written by a newer version than this one, or by the first one, whose layers
                were others; or with the other ``--branch-constraint``.
        """
        super().upgrade_state_dict_named(state_dict, name)
        if int(state_dict.get("version", self.state_version)) < self.state_version:
            raise ValueError("the checkpoint has the layers of version 1, which this code no longer has: train anew")
        version = state_dict.setdefault("branch_weights_version", self.branch_weights_version)
        vectors = {f"{name}.weight": each for name, each in self.named_modules() if isinstance(each, SimplexVector)}
        if int(version) != int(self.branch_weights_version):
            state_dict["branch_weights_version"] = self.branch_weights_version
            state_dict |= {parameter: vector.weight.detach() for parameter, vector in vectors.items()}
        for parameter in vectors.keys() & state_dict.keys():
            vectors[parameter].check_constraint(state_dict[parameter])
