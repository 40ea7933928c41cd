"""The Weighted Transformer (Ahmed et al. 2017): encoder, decoder and model.

B sentences, T target positions, S source positions, d model width.  Incremental decoding is in the module `layers`.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from fairseq.data import Dictionary
from fairseq.models import register_model
from fairseq.tasks import FairseqTask
from torch import Tensor, nn

from fairseq_plugins.common.embedding import InputEmbedding, normal_embedding
from fairseq_plugins.common.model import IncrementalDecoder, SourceEncoder, TranslationModel
from fairseq_plugins.common.options import Options, register_presets
from fairseq_plugins.common.prefix_tree import PrefixTree
from fairseq_plugins.common.source import Source, padding_bias
from fairseq_plugins.common.weight_norm import Linear
from fairseq_plugins.weighted_transformer.branches import SimplexVector, check_simplex
from fairseq_plugins.weighted_transformer.config import (
    BRANCH_WEIGHTS,
    PRESETS,
    WeightedTransformerConfig,
    resolve_config,
)
from fairseq_plugins.weighted_transformer.layers import DecoderLayer, EncoderLayer, WeightedTransformerDecoding


class WeightedTransformerEncoder(SourceEncoder):
    """An encoder of layers with branched self-attention."""

    def __init__(self, cfg: Options, dictionary: Dictionary, embedding: InputEmbedding) -> None:
        super().__init__(dictionary, embedding)
        self.layers = nn.ModuleList(EncoderLayer(cfg) for _ in range(cfg.encoder_layers))

    def encode(self, e: Tensor, padding_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output of the last layer, (B, S, d), as keys and as values."""
        x, bias = e, padding_bias(padding_mask, e.dtype).unsqueeze(1)
        for layer in self.layers:
            x = layer(x, bias)
        return x, x


class WeightedTransformerDecoder(IncrementalDecoder):
    """A decoder of layers with causal self-attention and branched attention to the source."""

    decoding_class = WeightedTransformerDecoding

    def __init__(
        self, cfg: Options, dictionary: Dictionary, embedding: InputEmbedding, output_projection: Linear
    ) -> None:
        super().__init__(dictionary, embedding)
        self.layers = nn.ModuleList(DecoderLayer(cfg) for _ in range(cfg.decoder_layers))
        self.output_projection = output_projection

    def features(self, g: Tensor, source: Source) -> tuple[Tensor, Tensor | None]:
        """Return features, (B, T, d), and the last layer's attention averaged over heads, (B, T, S) or None.

        Targets must be padded on the right, so that causal self-attention does not read padding.
        """
        x = g
        for layer in self.layers:
            x, query = layer(x, source)
        if not self.wants_attention:
            return x, None
        heads = cast(DecoderLayer, layer).source_attention
        return x, heads.weights(query, source.keys, source.bias.unsqueeze(1)).mean(dim=1)

    def attention_modules(self) -> dict[int, nn.Module]:
        """Return the attention modules by layer number; see `IncrementalDecoder.attention_modules`."""
        layers = cast("list[DecoderLayer]", self.layers)
        return {number: layer.source_attention for number, layer in enumerate(layers, 1)}

    def features_of_prefixes(self, tree: PrefixTree, source: Source) -> Tensor:
        """Return the features of all M prefixes of a batch, (M, d), in the tree's order."""
        self.embedding.check_length(tree.nodes.size(1))
        x = tree.by_sentence(self.embedding.step(tree.words, tree.positions))
        seen = tree.bias(x.dtype)
        for layer in self.layers:
            x, _ = layer(x, source, seen)
        return tree.flat(x)


@register_model("weighted_transformer", dataclass=WeightedTransformerConfig)
class WeightedTransformerModel(TranslationModel):
    """A Transformer with weighted branches; each branch has a head and a part of the feed-forward network."""

    family = "weighted_transformer"
    onnx_program = "fairseq_plugins.weighted_transformer.onnx"
    state_version = 2

    def __init__(
        self, encoder: WeightedTransformerEncoder, decoder: WeightedTransformerDecoder, branch_weights: str
    ) -> None:
        super().__init__(encoder, decoder)
        self._calls = 0
        # fairseq's moving average of parameters skips only tensors whose names contain "version".
        self.branch_weights_version: Tensor
        self.register_buffer("branch_weights_version", torch.tensor(BRANCH_WEIGHTS.index(branch_weights)))

    @classmethod
    def build(cls, cfg: Options, task: FairseqTask) -> WeightedTransformerModel:
        """Build the model; see `TranslationModel.build`."""
        resolve_config(cfg)
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
                "--share-embeddings all: source and target have different dictionaries; run fairseq-preprocess with "
                "--joined-dictionary, or use --share-embeddings decoder"
            )
        output_projection = Linear(dim, len(task.target_dictionary), bias=False)
        if sharing == "none":
            nn.init.normal_(output_projection.weight, mean=0, std=dim**-0.5)
        else:
            output_projection.weight = target_words.weight  # type: ignore[misc]

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

    @classmethod
    def training_options(cls, warmup: int) -> str:
        """Return the paper's optimizer and schedule, with 0.7 times the paper's learning rate.

        With d = 256, the rate after warm-up is 0.04 / sqrt(updates).
        """
        return (
            "--criterion weighted_label_smoothed_cross_entropy --optimizer simplex_adam "
            f"--lr-scheduler weighted_inverse_sqrt --lr-scale 0.7 --warmup-updates {warmup} "
            f"--branch-lr-scale 0.1 --branch-warmup-updates {warmup // 10} --fp16-no-flatten-grads"
        )

    def train(self, mode: bool = True) -> WeightedTransformerModel:
        """Set training or evaluation mode; some calls first check that κ and α are on the simplex.

        The check needs a synchronisation with the device, so not every call checks.  The check runs before the model
        leaves training mode, that is before validation and translation.  To detect a wrong optimizer early, the check
        also runs at calls 1, 2, 4, 8 and so on; fairseq's trainer calls this method at least twice per update.
        """
        self._calls += mode
        if self.training and not (mode and self._calls & (self._calls - 1)):
            check_simplex(self)
        super().train(mode)
        return self

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> None:
        """Adapt a checkpoint to this model.

        If ``--branch-weights`` was different in training, this model's branch weights replace the checkpoint's.  For
        example, ``--model-overrides "{'branch_weights': 'uniform'}"`` changes the option after training.
        """
        super().upgrade_state_dict_named(state_dict, name)
        if int(state_dict.get("version", self.state_version)) < self.state_version:
            raise ValueError("the checkpoint has layers of version 1, which are no longer supported: train again")
        version = state_dict.setdefault("branch_weights_version", self.branch_weights_version)
        vectors = {f"{name}.weight": each for name, each in self.named_modules() if isinstance(each, SimplexVector)}
        if int(version) != int(self.branch_weights_version):
            state_dict["branch_weights_version"] = self.branch_weights_version
            state_dict |= {parameter: vector.weight.detach() for parameter, vector in vectors.items()}
        for parameter in vectors.keys() & state_dict.keys():
            vectors[parameter].check_constraint(state_dict[parameter])


register_presets("weighted_transformer", WeightedTransformerConfig, PRESETS)
