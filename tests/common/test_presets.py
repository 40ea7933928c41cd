"""Compare the architectures with the papers' sizes, not with the code; comments name the sources of other numbers."""

from __future__ import annotations

import re
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_NAME_REGISTRY, ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY
from torch import nn


def vocabulary(size: int) -> Dictionary:
    dictionary = Dictionary()
    for index in range(size - len(dictionary)):
        dictionary.add_symbol(str(index))
    return dictionary


def resolve(architecture: str, source: int = 50, target: int | None = None, **options: Any) -> tuple[Namespace, Any]:
    """Return the options and a model on the meta device; without a target size, both sides share one dictionary."""
    args = Namespace(arch=architecture, **options)
    if architecture in MODEL_DATACLASS_REGISTRY:  # the name of a family itself has no preset
        args = Namespace(**vars(MODEL_DATACLASS_REGISTRY[architecture]()), **vars(args))
    args.max_source_positions = args.max_target_positions = 1024
    ARCH_CONFIG_REGISTRY[architecture](args)
    source_dictionary = vocabulary(source)
    target_dictionary = source_dictionary if target is None else vocabulary(target)
    task = SimpleNamespace(source_dictionary=source_dictionary, target_dictionary=target_dictionary)
    with torch.device("meta"):
        return args, ARCH_MODEL_REGISTRY[architecture].build_model(args, task)


def build(architecture: str, *sizes: int, **options: Any) -> Any:
    return resolve(architecture, *sizes, **options)[1]


def parameters(model: nn.Module, without: str = "nothing") -> int:
    """Count the parameters in use: fairseq 0.12.2's encoder layers hold theirs twice, for torch's fused layer."""
    copy = re.compile(r"encoder\.layers\.\d+\.\w+")
    return sum(
        value.numel() for name, value in model.named_parameters() if without not in name and not copy.fullmatch(name)
    )


# Gehring et al. 2017, sections 4.2, 5.1, 5.4 and 5.7: encoder and decoder as (units, kernel), and embedding size.
EN_RO = [(512, 3)] * 20
EN_DE = [(512, 3)] * 10 + [(768, 3)] * 3 + [(2048, 1)] * 2
# Section 5.1 says "15 layers" but lists 14, five of them with 512 units; the authors' code has a sixth.
EN_FR = [(512, 3)] * 6 + [(768, 3)] * 4 + [(1024, 3)] * 3 + [(2048, 1), (4096, 1)]
CONVS2S = {
    "convs2s": (EN_RO, EN_RO, 512),
    "convs2s_wmt_en_ro": (EN_RO, EN_RO, 512),
    "convs2s_wmt_en_de": (EN_DE, EN_DE, 512),
    "convs2s_wmt_en_fr": (EN_FR, EN_FR, 512),
    # "Six layers in the encoder and decoder each, hidden size 256"; kernel and embeddings are not in the paper.
    "convs2s_gigaword": ([(256, 3)] * 6, [(256, 3)] * 6, 256),
    "convs2s_analysis": ([(512, 3)] * 13, [(512, 5)] * 5, 512),
    # These two are not in the paper: the first is compared with fairseq's below, the second is the quickstart's.
    "convs2s_iwslt_de_en": ([(256, 3)] * 4, [(256, 3)] * 3, 256),
    "convs2s_tiny": ([(128, 3)] * 3, [(128, 3)] * 3, 128),
}


@pytest.mark.parametrize("architecture", CONVS2S)
def test_convs2s(architecture: str) -> None:
    *layers, embed_dim = CONVS2S[architecture]
    args, model = resolve(architecture)
    assert args.dropout == 0.1  # fairseq's value; the paper gives none
    for side, expected in zip((model.encoder, model.decoder), layers, strict=True):
        assert side.embedding.words.embedding_dim == side.embedding.positions.embedding_dim == embed_dim
        assert side.to_embedding.out_features == embed_dim
        # The gates double the number of units.
        shapes = [tuple(convolution.weight.shape[::2]) for convolution in side.convolutions]
        assert shapes == [(kernel, 2 * units) for units, kernel in expected]
        assert [shortcut.distance for shortcut in side.shortcuts] == [1] * len(expected)
    # Every decoder layer has attention (section 3.3).
    assert None not in list(model.decoder.attentions)


# Ahmed et al. 2017, table 2: N, d_model, d_ff, h = M, P_drop, and millions of parameters.
WEIGHTED_TRANSFORMER = {
    "weighted_transformer": (6, 512, 2048, 8, 0.1, 65),
    "weighted_transformer_small": (6, 512, 2048, 8, 0.1, 65),  # A
    "weighted_transformer_large": (6, 1024, 4096, 16, 0.3, 213),  # B
    "weighted_transformer_2layer": (2, 512, 2048, 8, 0.1, 36),  # C
    "weighted_transformer_4layer": (4, 512, 2048, 8, 0.1, 50),
    "weighted_transformer_8layer": (8, 512, 2048, 8, 0.3, 80),
    # Not in the paper: fairseq's (see below) with its recipe's dropout, and those of examples/.
    "weighted_transformer_iwslt_de_en": (6, 512, 1024, 4, 0.3, None),
    "weighted_transformer_256": (3, 256, 1024, 4, 0.2, None),
    "weighted_transformer_tiny": (2, 128, 512, 4, 0.1, None),
}


@pytest.mark.parametrize("architecture", WEIGHTED_TRANSFORMER)
def test_weighted_transformer(architecture: str) -> None:
    *sizes, millions = WEIGHTED_TRANSFORMER[architecture]
    # "All sentences share a vocabulary"; its size of 37 000 words is from Vaswani et al.
    args, model = resolve(architecture, source=37000)
    assert (args.attention_dropout, args.relu_dropout) == (0.1, 0)  # section 4.1
    for side in ("encoder", "decoder"):
        names = (f"{side}_layers", "encoder_embed_dim", f"{side}_ffn_embed_dim", f"{side}_attention_heads", "dropout")
        assert [getattr(args, name) for name in names] == sizes
    assert model.decoder.output_projection.weight is model.encoder.embedding.words.weight
    assert model.decoder.embedding.words is model.encoder.embedding.words
    assert model.encoder.embedding.positions is model.decoder.embedding.positions is None  # sinusoidal
    if millions is not None:
        # Vaswani et al.'s figures are about 2 million above those of 37 000 words; a layer has 7 million parameters.
        assert parameters(model) / 1e6 == pytest.approx(millions, abs=2.5)


# Gehring et al. 2016, sections 4.2 and 4.3, tables 1 and 2: layers of CNN-a (512 units), of CNN-c (256 units) and of
# the decoder (512 units), and dropout.  Kernels have width 3, and embeddings 256 numbers.
CONV_ENCODER = {
    "conv_encoder": (6, 3, 1, 0.2),
    "conv_encoder_iwslt_de_en": (6, 3, 1, 0.2),
    "conv_encoder_wmt_en_ro": (8, 4, 1, 0.1),
    "conv_encoder_wmt_en_de": (15, 5, 1, 0.1),
    "conv_encoder_wmt_en_fr": (20, 5, 2, 0.1),
}


@pytest.mark.parametrize("architecture", CONV_ENCODER)
def test_conv_encoder(architecture: str) -> None:
    attention, aggregation, decoder_layers, dropout = CONV_ENCODER[architecture]
    args, model = resolve(architecture)
    assert (args.encoder_embed_dim, args.decoder_hidden_size, args.dropout) == (256, 512, dropout)
    for stack, layers, units in ((model.encoder.cnn_a, attention, 512), (model.encoder.cnn_c, aggregation, 256)):
        assert [tuple(each.weight.shape) for each in stack.convolutions] == [(units, units, 3)] * layers
    assert model.encoder.embedding.positional
    assert not model.decoder.embedding.positional
    assert len(model.decoder.upper) == decoder_layers - 1


def test_the_other_encoders_of_the_paper() -> None:
    """Table 1, IWSLT'14: an encoder without parameters except embeddings, and an encoder of two LSTMs of 512 units."""
    pooling, bilstm = build("conv_encoder_pooling"), build("conv_encoder_bilstm")
    assert parameters(pooling.encoder, without="embedding") == 0
    assert (pooling.encoder.width, pooling.encoder.embedding.positional) == (5, True)
    assert not bilstm.encoder.embedding.positional
    lstms = [[(lstm.input_size, lstm.hidden_size) for lstm in stack] for stack in bilstm.encoder.stacks]
    assert lstms == [[(256, 512)], [(256, 512)]]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("convs2s_wmt_en_ro", "fconv_wmt_en_ro"),
        ("convs2s_iwslt_de_en", "fconv_iwslt_de_en"),
        ("weighted_transformer_small", "transformer"),
        ("weighted_transformer_large", "transformer_vaswani_wmt_en_de_big"),
        ("weighted_transformer_iwslt_de_en", "transformer_iwslt_de_en"),
    ],
)
def test_models_are_as_large_as_fairseqs(ours: str, theirs: str) -> None:
    """Parameter counts are equal, except for fconv's position rows and two weights, κ and α, per head of each layer."""
    args, model = resolve(ours)
    more, options = 0, {"share_all_embeddings": True}
    if "convs2s" in ours:
        options = {"decoder_out_embed_dim": args.decoder_out_embed_dim}
    else:
        more = 2 * args.encoder_layers * 2 * args.encoder_attention_heads
    reference = build(theirs, **options)
    assert parameters(model, without="positions") - more == parameters(reference, without="positions")


def test_every_architecture_is_here() -> None:
    written = {*CONVS2S, *WEIGHTED_TRANSFORMER, *CONV_ENCODER}
    written |= {"conv_encoder_pooling", "conv_encoder_bilstm", "conv_encoder_tiny"}
    families = ("convs2s", "weighted_transformer", "conv_encoder")
    assert written == {name for name, family in ARCH_MODEL_NAME_REGISTRY.items() if family in families}
