#!/usr/bin/env python3
"""Draw an architecture, with the sizes of its modules: ``draw.py ARCH PICTURE``.

ARCH is an architecture of this plugin, such as ``convs2s_iwslt_de_en``, ``weighted_transformer_small`` or
``conv_encoder_wmt_en_ro``.  Models with an LSTM encoder cannot be drawn.  The script builds the model, and reads sizes
and numbers of parameters from its modules, not from its options.  V is the size of the vocabulary.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY, MODEL_REGISTRY, BaseFairseqModel
from paper import GAP, HEIGHT, LINE, Box, Paper, runs
from torch import nn

import fairseq_plugins

fairseq_plugins.install()

SOURCE, TARGET = "source words", "target words so far"


def build(architecture: str) -> BaseFairseqModel:
    """Build an architecture with random parameters and an empty dictionary.

    Raises:
        ValueError: the architecture is unknown, or is only a model's name (``convs2s``), which defines no layer sizes.
    """
    if architecture not in ARCH_CONFIG_REGISTRY or architecture in MODEL_REGISTRY:  # a model's name has no sizes
        raise ValueError(
            f"ARCH {architecture}: unknown, or a model without sizes; use an architecture such as convs2s_iwslt_de_en"
        )
    dictionary = Dictionary()
    task: Any = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    args = Namespace(arch=architecture, max_source_positions=1024, max_target_positions=1024)
    ARCH_CONFIG_REGISTRY[architecture](args)
    return ARCH_MODEL_REGISTRY[architecture].build_model(args, task)


def shape(linear: Any) -> str:
    """Return the input and output size of a linear layer, as text for its box."""
    return f"{linear.in_features} → {linear.out_features}"


def parameters(model: BaseFairseqModel) -> str:
    """Return the number of parameters that do not depend on the vocabulary."""
    sides = [*model.encoder.named_children(), *model.decoder.named_children()]
    parts = [part for name, part in sides if name not in ("embedding", "output_projection")]
    return f"{sum(each.numel() for part in parts for each in part.parameters()) / 1e6:.1f} M"


def embedding(paper: Paper, x: float, side: Any, words: str) -> Box:
    """Draw the words at the bottom of a column, and their embedding above them."""
    paper.text(x, 0.14, words, 8.5, style="italic")
    name, positions = f"embedding {'e' if words == SOURCE else 'g'}", ", positions" if side.embedding.positional else ""
    box = paper.box("embedding", x, 0.46, name, f"V words{positions} → {side.embedding.words.embedding_dim}")
    paper.arrow((x, 0.24), box.bottom)
    return box


def output(paper: Paper, below: Box, decoder: Any) -> float:
    """Draw the output layer at the top of a column, and return the height of its upper edge."""
    again = ", the embedding" if decoder.output_projection.weight is decoder.embedding.words.weight else ""
    box = paper.above(below, "linear", "output layer", f"{decoder.output_projection.in_features} → V words{again}")
    end = box.top[1] + 0.2
    paper.arrow(box.top, (box.x, end))
    paper.text(box.x, end + 0.1, "probabilities of the next word", 8.5, style="italic")
    return end + 0.25


def draw_convs2s(paper: Paper, model: BaseFairseqModel) -> tuple[float, float]:
    """Draw two stacks of gated convolutions, with attention in the decoder's layers; return width and height."""
    encoder, decoder = model.encoder, model.decoder
    left, right, wide = 1.6, 6.35, 2.9

    def convolution(each: Any) -> str:
        kernel, inputs, outputs = each.weight.shape
        return f"kernel {kernel}, {inputs} → 2 · {outputs // 2}, gate → {outputs // 2}"

    def shortcut(each: Any) -> str:
        return "" if each.projection is None else shape(each.projection)

    e = embedding(paper, left, encoder, SOURCE)
    below = paper.above(e, "linear", "linear", shape(encoder.from_embedding))
    layers = zip(encoder.convolutions, encoder.shortcuts, strict=True)
    for times, (sizes, widening) in runs((convolution(c), shortcut(s)) for c, s in layers):
        box = paper.above(below, "convolution", "gated convolution", sizes, gap=2 * GAP)
        below = paper.residual(below, box, wide, f"{times} ×", "· √½", widening)
    z = paper.above(below, "linear", "linear", shape(encoder.to_embedding), gap=2 * GAP)

    g = embedding(paper, right, decoder, TARGET)
    below = paper.above(g, "linear", "linear", shape(decoder.from_embedding))
    source, query = left + wide / 2 + 0.25, right + wide / 2 + 0.16  # x coordinates of the lines to the attention
    asked = []
    for times, (sizes, attention, widening) in runs(
        (convolution(c), a and f"query {shape(a.in_projection)}, out {shape(a.out_projection)}", shortcut(s))
        for c, a, s in decoder.layers
    ):
        box = paper.above(below, "convolution", "causal gated convolution", sizes, gap=2 * GAP)
        if attention is not None:
            box = paper.above(box, "attention", "attention", attention)
            paper.arrow((source, box.left[1]), box.left)
            paper.arrow((query, box.right[1]), box.right)
            asked.append(box)
        below = paper.residual(below, box, wide, f"{times} ×", "· √½", widening)
    paper.arrow(g.right, (query, g.right[1]), (query, asked[-1].right[1]), tip=False)
    paper.text(query + 0.08, (g.right[1] + asked[0].right[1]) / 2, "g, in each query", 7.5, rotation=90)
    below = paper.above(below, "linear", "linear", shape(decoder.to_embedding), gap=2 * GAP)

    for part, name in ((z, "z"), (e, "e")):
        paper.arrow(part.right, (source, part.right[1]), (source, asked[0].left[1]), tip=False)
        paper.text(source - 0.12, part.right[1] + 0.1, name, 8.5)
    paper.arrow((source, asked[0].left[1]), (source, asked[-1].left[1]), tip=False)
    middle = (source + right - wide / 2) / 2
    paper.text(middle, asked[0].left[1] + 0.1, "keys z")
    paper.text(middle, asked[0].left[1] - 0.11, "values (z + e) √½")
    return query + 0.22, max(output(paper, below, decoder), z.top[1] + 0.2)


def draw_conv_encoder(paper: Paper, model: BaseFairseqModel) -> tuple[float, float]:
    """Draw two stacks of convolutions on the same embeddings, and an LSTM with attention; return width and height."""
    encoder, decoder = model.encoder, model.decoder
    left, right, wide, narrow = 1.35, 6.95, 2.4, 1.9

    e = embedding(paper, left + 1.3, encoder, SOURCE)
    tops = []
    for x, name, stack in ((left, "CNN-a", encoder.cnn_a), (left + 2.6, "CNN-c", encoder.cnn_c)):
        below = Box(x, e.top[1] + GAP, narrow, 0)
        paper.arrow(e.top, (e.x, below.y), below.top, tip=False)
        if isinstance(stack.from_embedding, nn.Linear):
            below = paper.above(below, "linear", "linear", shape(stack.from_embedding), narrow)
        sizes = (
            f"kernel {each.weight.size(2)}, {each.weight.size(1)} → {each.weight.size(0)}"
            for each in stack.convolutions
        )
        for times, size in runs(sizes):
            box = paper.above(below, "convolution", "convolution", size, narrow, gap=2 * GAP)
            below = paper.residual(below, box, wide, f"{name}, {times} ×", "tanh")
        if isinstance(stack.to_embedding, nn.Linear):
            below = paper.above(below, "linear", "linear", shape(stack.to_embedding), narrow, gap=2 * GAP)
        tops.append(below)

    g = embedding(paper, right, decoder, TARGET)
    cell = decoder.attentive
    attention = paper.above(g, "attention", "attention", f"query {shape(cell.query)}", gap=0.75)
    units = cell.recurrent.in_features
    sizes = f"g {cell.input.in_features}, c {cell.conditional_input.in_features} → 4 · {units} → h {units}"
    lstm = paper.above(attention, "recurrent", "LSTM", sizes, gap=0.35)
    paper.text(right + 0.1, attention.top[1] + 0.16, "c")
    # Arrows from the state h back to the attention and the LSTM, and from the embedding g to the LSTM.
    back, end = right - 1.28, lstm.top[1] + 0.17
    paper.arrow(
        (right, end),
        (back, end),
        (back, attention.y - 0.17),
        (right - 0.8, attention.y - 0.17),
        (right - 0.8, attention.y),
    )
    paper.arrow((back, lstm.left[1]), lstm.left)
    paper.text(back + 0.14, end + 0.1, "h")
    query = right + 1.28
    paper.arrow(g.right, (query, g.right[1]), (query, lstm.right[1]), lstm.right)
    paper.text(query + 0.1, g.top[1], "g")
    paper.frame(right, attention.y - 0.35, end + 0.3, 2.9, "step by step")
    below = lstm
    for upper in decoder.upper:
        below = paper.above(below, "recurrent", "LSTM", f"{upper.input_size} → {upper.hidden_size}", gap=0.6)
    below = paper.above(below, "linear", "linear", shape(decoder.to_embedding), gap=0.3 if decoder.upper else 0.6)

    source, high = right - 1.65, max(top.top[1] for top in tops) + 0.2
    for top, level, name in zip(tops, (high + 0.3, high), ("keys z", "values"), strict=True):
        paper.arrow(top.top, (top.x, level), (source, level), tip=False)
        paper.text(top.x + 0.5, level + 0.1, name)
    paper.arrow((source, high + 0.3), (source, attention.left[1]), attention.left)
    return right + 1.6, max(output(paper, below, decoder), high + 0.5)


def draw_weighted_transformer(paper: Paper, model: BaseFairseqModel) -> tuple[float, float]:
    """Draw the Weighted Transformer's layers, whose attention heads are branches; return width and height."""
    encoder, decoder = model.encoder, model.decoder
    left, right, wide = 2.0, 6.65, 3.7

    def heads(attention: Any) -> str:
        return f"{attention.heads} heads of {attention.query.out_features // attention.heads}"

    def branches(block: Any, below: Box, start: Box) -> Box:
        """Draw the first and last branch of a block, and its two sums; the residual connection begins at ``start``."""
        M, dim, inner = block.branches, block.out.in_features, block.first.out_features
        lane, y = below.x - wide / 2 + 0.25, below.top[1] + 0.32
        level, top = y + HEIGHT + 0.25, y + 2 * HEIGHT + 0.75
        for x, number in ((below.x - 0.6, 1), (below.x + 1.0, M)):
            i = str(number).translate(str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉"))
            head = paper.box("attention", x, y, f"κ{i} Wᴼ{i}", f"{dim // M} → {dim}", 1.35)
            sizes = f"{dim} → {inner // M} → {dim}"
            network = paper.box("network", x, level + 0.2, f"α{i} FFN{i}(x + h̄{i})", sizes, 1.35)
            paper.arrow(below.top, (below.x, y - 0.15), (x, y - 0.15), head.bottom)
            paper.arrow(head.top, network.bottom)
            paper.arrow(network.top, (x, top), (below.x + 0.09, top))
            paper.arrow((x, level), (lane + 0.09, level))
            paper.axes.plot(x, level, ".", color=LINE, markersize=5)
        for row in (y, level + 0.2):
            paper.text(below.x + 0.2, row + HEIGHT / 2, "⋯", 11)
        paper.plus(lane, level, "layer norm")
        paper.arrow((start.x, start.y), (lane, start.y), (lane, level - 0.09))
        paper.arrow((lane, level + 0.09), (lane, top), (below.x - 0.09, top))
        return paper.plus(below.x, top, "layer norm", low=True)

    e = embedding(paper, left, encoder, SOURCE)
    start = Box(left, e.top[1] + 0.35, 0, 0)
    attention = paper.above(e, "attention", "self-attention", heads(encoder.layers[0].attention), gap=0.55)
    y = branches(encoder.layers[0].branches, attention, start)
    paper.frame(left, start.y - 0.15, y.top[1] + 0.22, wide, f"{len(encoder.layers)} ×")

    g, layer = embedding(paper, right, decoder, TARGET), decoder.layers[0]
    start = Box(right, g.top[1] + 0.35, 0, 0)
    below = paper.above(g, "attention", "causal self-attention", heads(layer.self_attention), gap=0.55)
    below = paper.above(below, "linear", "linear", shape(layer.self_attention_out))
    add = paper.plus(right, below.top[1] + 0.28, "layer norm")
    paper.arrow(below.top, add.bottom)
    lane = right - wide / 2 + 0.25
    paper.arrow((right, start.y), (lane, start.y), (lane, add.left[1]), add.left)
    x = Box(right, add.top[1] + 0.16, 0, 0)
    below = paper.above(add, "attention", "attention to the source", heads(layer.source_attention), gap=0.36)
    entry, source = below, left + wide / 2 + 0.2
    below = branches(layer.branches, below, x)
    paper.frame(right, start.y - 0.15, below.top[1] + 0.22, wide, f"{len(decoder.layers)} ×")
    paper.arrow(y.top, (left, y.top[1] + 0.45), (source, y.top[1] + 0.45), (source, entry.left[1]), entry.left)
    paper.text(left + 0.1, y.top[1] + 0.55, "keys and values of every decoder layer", ha="left")
    gap = Box(below.x, below.y, below.width, below.height + 0.22)
    paper.arrow(below.top, gap.top, tip=False)
    return right + wide / 2 + 0.15, output(paper, gap, decoder)


# Drawing functions, by the encoder's class. No function draws LSTM encoders.
DRAWINGS = {
    "ConvS2SEncoder": draw_convs2s,
    "WeightedTransformerEncoder": draw_weighted_transformer,
    "ConvolutionalEncoder": draw_conv_encoder,
}


def draw(architecture: str) -> tuple[Paper, float, float]:
    """Draw an architecture; return the picture, its width and its height.

    Raises:
        ValueError: `build` refuses the architecture, or no function draws its encoder.
    """
    model = build(architecture)
    encoder = type(model.encoder).__name__
    if encoder not in DRAWINGS:
        raise ValueError(f"ARCH {architecture}: no drawing for its encoder, {encoder}; use another architecture")
    paper = Paper()
    width, height = DRAWINGS[encoder](paper, model)
    title = f"{architecture}: {parameters(model)} parameters without embeddings and output layer"
    paper.text(0.15, height + 0.12, title, 9.5, ha="left", weight="bold")
    return paper, width, height + 0.3


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("architecture", metavar="ARCH", help="architecture, such as convs2s_iwslt_de_en")
    parser.add_argument("picture", type=Path, metavar="PICTURE", help="file to write: .svg, .png, .pdf")
    args = parser.parse_args()
    try:
        paper, width, height = draw(args.architecture)
        paper.save(args.picture, width, height)
    except (OSError, ValueError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
