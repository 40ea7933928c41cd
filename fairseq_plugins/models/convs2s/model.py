"""ConvS2S: Convolutional Sequence to Sequence Learning (Gehring et al. 2017, arXiv 1705.03122)."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from fairseq.data import Dictionary
from fairseq.models import FairseqEncoderDecoderModel, register_model
from fairseq.tasks import FairseqTask
from omegaconf import DictConfig

from fairseq_plugins.models.convs2s.config import DEFAULT_SIZES, ConvS2SConfig, check_dimensions
from fairseq_plugins.models.convs2s.decoder import ConvS2SDecoder
from fairseq_plugins.models.convs2s.encoder import ConvS2SEncoder
from fairseq_plugins.models.incremental import check_target_padding
from fairseq_plugins.models.presets import fill_in
from fairseq_plugins.models.state_version import check_version, register_version
from fairseq_plugins.nn.embedding import InputEmbedding, pretrained_embedding
from fairseq_plugins.nn.layer_list import parse_attention, parse_convolutions
from fairseq_plugins.nn.unfilled import unfilled_where_filled_later
from fairseq_plugins.nn.weight_norm import fold_weight_norm_, remove_weight_norm_

__all__ = ["ConvS2SModel"]

STATE_VERSION = 1


@register_model("convs2s", dataclass=ConvS2SConfig)
class ConvS2SModel(FairseqEncoderDecoderModel):
    """A convolutional encoder and a convolutional decoder with multi-step attention."""

    def __init__(self, encoder: ConvS2SEncoder, decoder: ConvS2SDecoder) -> None:
        super().__init__(encoder, decoder)
        register_version(self, STATE_VERSION)

    @classmethod
    @unfilled_where_filled_later()
    def build_model(cls, cfg: Namespace | DictConfig, task: FairseqTask) -> ConvS2SModel:
        """Build the model that the options describe.

        Raises:
            ValueError: an option is malformed, or two do not fit together.
        """
        fill_in(cfg, DEFAULT_SIZES)
        check_dimensions(cfg)
        check_target_padding(task, "convs2s")
        encoder_layers = parse_convolutions(cfg.encoder_layers, "--encoder-layers")
        decoder_layers = parse_convolutions(cfg.decoder_layers, "--decoder-layers")
        attends = parse_attention(cfg.decoder_attention, len(decoder_layers), "--decoder-attention")

        def embedding(side: str, dictionary: Dictionary, max_positions: int, owner: type) -> InputEmbedding:
            dim, path = getattr(cfg, f"{side}_embed_dim"), getattr(cfg, f"{side}_embed_path")
            return InputEmbedding(
                pretrained_embedding(dictionary, dim, path, f"--{side}-embed-path"),
                max_positions=max_positions,
                positions=None if getattr(cfg, f"no_{side}_positional_embeddings") else "learned",
                dropout=cfg.dropout,
                owner=owner.__name__,
            )

        encoder = ConvS2SEncoder(
            task.source_dictionary,
            embedding("encoder", task.source_dictionary, cfg.max_source_positions, ConvS2SEncoder),
            encoder_layers,
            dropout=cfg.dropout,
            attention_layers=sum(attends),
        )
        decoder = ConvS2SDecoder(
            task.target_dictionary,
            embedding("decoder", task.target_dictionary, cfg.max_target_positions, ConvS2SDecoder),
            decoder_layers,
            attends,
            out_embed_dim=cfg.decoder_out_embed_dim,
            dropout=cfg.dropout,
            tied=cfg.share_input_output_embed,
        )
        return cls(encoder, decoder)

    def make_generation_fast_(self, **kwargs: Any) -> None:
        """Prepare for translating: weights are normalised once and for all, and laid out for steps."""
        super().make_generation_fast_(**kwargs)
        remove_weight_norm_(self)
        for convolution in self.decoder.convolutions:
            convolution.lay_out_()

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> None:
        """Make a checkpoint fit this model, also one of training a model that is prepared to translate.

        Raises:
            ValueError: the checkpoint was written by a newer version than this one.
        """
        super().upgrade_state_dict_named(state_dict, name)
        check_version(state_dict, STATE_VERSION, "convs2s")
        fold_weight_norm_(state_dict, self)
