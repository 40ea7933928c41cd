"""A minimal family in a user's own folder: a decaying sum of words, and attention to the source's words.

``s_t = s_{t-1} / 2 + g_t``, ``a_t = softmax(s_t · z)``, ``features = W (s_t + Σ_j a_tj z_j)``.
"""

from dataclasses import dataclass, field
from typing import Optional

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.models import register_model
from torch import Tensor, nn

import fairseq_plugins
from fairseq_plugins.common.decoding import StepwiseDecoding, reorder_rows, update_state
from fairseq_plugins.common.embedding import InputEmbedding, normal_embedding
from fairseq_plugins.common.model import IncrementalDecoder, SourceEncoder, TranslationModel
from fairseq_plugins.common.options import SIZE, check_ranges, register_presets
from fairseq_plugins.common.source import softmax
from fairseq_plugins.common.weight_norm import Linear

fairseq_plugins.install(command=True)


@dataclass
class ToyConfig(FairseqDataclass):
    width: Optional[int] = field(  # noqa: UP045  (fairseq reads no other form)
        default=None, metadata={"help": "width of embeddings (default: 16)", "range": SIZE}
    )


class ToyEncoder(SourceEncoder):
    def encode(self, e: Tensor, padding_mask: Tensor) -> tuple[Tensor, Tensor]:
        return e, e


class ToyAttention(nn.Module):
    def forward(self, s: Tensor, source) -> tuple[Tensor, Tensor]:
        a = softmax(torch.bmm(s, source.keys.transpose(1, 2)) + source.bias)
        return torch.bmm(a, source.values), a


class ToyDecoding(StepwiseDecoding):
    def set_up(self) -> None:
        self.mix = self.prepare(self.decoder.mix.weight, self.decoder.mix.bias)
        self.state = self.source.keys.new_zeros(self.order.rows, self.source.keys.size(-1))

    def compute(self, tokens: Tensor, order: Tensor | None) -> tuple[Tensor, Tensor | None]:
        state = reorder_rows(self.state, order)
        s = state / 2 + self.decoder.embedding.step(tokens, self.position)
        update_state(self, state=s)
        context, a = self.decoder.attention(self.by_sentence(s), self.source)
        return self.mix(s + context.flatten(0, 1)), a.flatten(0, 1) if self.decoder.wants_attention else None


class ToyDecoder(IncrementalDecoder):
    decoding_class = ToyDecoding

    def __init__(self, dictionary, embedding: InputEmbedding) -> None:
        super().__init__(dictionary, embedding)
        width = embedding.words.embedding_dim
        self.attention, self.mix = ToyAttention(), Linear(width, width)
        self.output_projection = Linear(width, len(dictionary))

    def features(self, g: Tensor, source) -> tuple[Tensor, Tensor | None]:
        s = [g[:, 0]]
        for t in range(1, g.size(1)):
            s.append(s[-1] / 2 + g[:, t])
        faded = torch.stack(s, dim=1)
        context, a = self.attention(faded, source)
        return self.mix(faded + context), a if self.wants_attention else None

    def attention_modules(self) -> dict[int, nn.Module]:
        return {1: self.attention}


@register_model("toy", dataclass=ToyConfig)
class ToyModel(TranslationModel):
    family = "toy"
    onnx_program = __name__

    @classmethod
    def build(cls, cfg, task) -> "ToyModel":
        check_ranges(cfg, ToyConfig)

        def embedding(dictionary) -> InputEmbedding:
            words = normal_embedding(len(dictionary), cfg.width or 16, dictionary.pad())
            return InputEmbedding(words, max_positions=64, positions="learned", dropout=0.0)

        source, target = task.source_dictionary, task.target_dictionary
        return cls(ToyEncoder(source, embedding(source)), ToyDecoder(target, embedding(target)))


register_presets("toy", ToyConfig, {"toy_wide": {"width": 32}})

# The code below describes the ONNX program.
PARTS = (ToyEncoder, ToyDecoder)


def encode(program, encoder, e: str) -> tuple[str, str]:
    return e, e


def set_up(program, decoder, keys: str, values: str):
    width = decoder.mix.in_features
    bias = program.bias
    return [(program.transposed(keys), ["B", width, "S"]), (values, ["B", "S", width]), (bias, ["B", 1, "S"])]


def step(program, decoder, g: str) -> tuple[str, list[str]]:
    width = decoder.mix.in_features
    keys, values, bias = program.sources
    state = program.state(width)
    s = program.Add(program.Mul(program.reordered(state), 0.5), g)
    program.keep(state, s)
    a = program.Softmax(program.Add(program.MatMul(program.by_sentence(s, width), keys), bias), axis=-1)
    context = program.Reshape(program.MatMul(a, values), [-1, width])
    return program.linear(program.Add(s, context), decoder.mix.weight, decoder.mix.bias), [a]
