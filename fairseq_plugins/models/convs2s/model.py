"""ConvS2S: Convolutional Sequence to Sequence Learning (Gehring et al. 2017, arXiv 1705.03122)."""

from __future__ import annotations

from fairseq.data import Dictionary
from fairseq.models import register_model
from fairseq.tasks import FairseqTask

from fairseq_plugins.models.convs2s.config import ConvS2SConfig, complete
from fairseq_plugins.models.convs2s.decoder import ConvS2SDecoder
from fairseq_plugins.models.convs2s.encoder import ConvS2SEncoder
from fairseq_plugins.models.convs2s.stepwise import ConvS2SDecoding
from fairseq_plugins.models.options import Options
from fairseq_plugins.models.translation_model import TranslationModel
from fairseq_plugins.nn.embedding import InputEmbedding, pretrained_embedding
from fairseq_plugins.nn.layer_list import parse_attention, parse_convolutions

__all__ = ["ConvS2SModel"]


@register_model("convs2s", dataclass=ConvS2SConfig)
class ConvS2SModel(TranslationModel):
    """A convolutional encoder and a convolutional decoder with multi-step attention."""

    family = "convs2s"
    decoding_class = ConvS2SDecoding

    @classmethod
    def build(cls, cfg: Options, task: FairseqTask) -> ConvS2SModel:
        """As of `TranslationModel`."""
        complete(cfg)
        encoder_layers = parse_convolutions(cfg.encoder_layers, "--encoder-layers")
        decoder_layers = parse_convolutions(cfg.decoder_layers, "--decoder-layers")
        attends = parse_attention(cfg.decoder_attention, len(decoder_layers))

        def embedding(side: str, dictionary: Dictionary, max_positions: int) -> InputEmbedding:
            dim, path = getattr(cfg, f"{side}_embed_dim"), getattr(cfg, f"{side}_embed_path")
            return InputEmbedding(
                pretrained_embedding(dictionary, dim, path, f"--{side}-embed-path"),
                max_positions=max_positions,
                positions=None if getattr(cfg, f"no_{side}_positional_embeddings") else "learned",
                dropout=cfg.dropout,
            )

        encoder = ConvS2SEncoder(
            task.source_dictionary,
            embedding("encoder", task.source_dictionary, cfg.max_source_positions),
            encoder_layers,
            dropout=cfg.dropout,
            attention_layers=sum(attends),
        )
        decoder = ConvS2SDecoder(
            task.target_dictionary,
            embedding("decoder", task.target_dictionary, cfg.max_target_positions),
            decoder_layers,
            attends,
            out_embed_dim=cfg.decoder_out_embed_dim,
            dropout=cfg.dropout,
            tied=cfg.share_input_output_embed,
        )
        return cls(encoder, decoder)
