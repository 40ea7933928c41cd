#!/usr/bin/env python3
"""Measure and draw the variance of activations and gradients through the layers of an untrained ConvS2S.

The model is an untrained `convs2s_wmt_en_ro` with dropout, 20 encoder layers and 20 decoder layers.  The input is a
sentence of random words.  The paper keeps the variance constant by three factors (Gehring et al. 2017, sections 3.4 and
3.5, appendix A): √½ after sums, 4 before gates, and p after dropout.  The script measures the model itself, and
variants without one of these factors, for three stacks: the encoder, the decoder, and an encoder without residual
connections, as in appendix A.

The script writes variance.png and variance.tsv, and prints the factor by which the variance changes across each stack.
"""

from __future__ import annotations

import argparse
import math
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY
from torch import Tensor

from fairseq_plugins.cli.figure import new_figure
from fairseq_plugins.common.weight_norm import MAGNITUDE
from fairseq_plugins.convs2s import layers
from fairseq_plugins.convs2s import model as model_module
from fairseq_plugins.convs2s.model import ConvS2SModel

ENCODER, DECODER, PLAIN = STACKS = ("encoder", "decoder", "encoder without residual connections")
# For each variant: a colour of Okabe and Ito's palette for colour-blind readers, and a marker.
VARIANTS = {
    "as in the paper": ("#0072B2", "o"),
    "without √½": ("#D55E00", "^"),
    "without the factor 4": ("#009E73", "s"),
    "without the factor p": ("#CC79A7", "D"),
}
WORDS = 1000
QUANTITIES = ("activations", "gradients")

# Variances of the activations and of their gradients, for the stack's input and each layer's output.
Variances = list[tuple[float, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the picture and the numbers")
    for option, default, text in (
        ("layers", 20, "number of layers in encoder and in decoder"),
        ("width", 512, "units of a layer, and size of embeddings"),
        ("length", 160, "number of words in the sentence; must be more than four times the number of layers"),
        ("dropout", 0.2, "dropout, 1 - p"),
        ("seed", 1, "random seed"),
    ):
        parser.add_argument(f"--{option}", type=type(default), default=default, help=f"{text} (default: %(default)s)")
    args = parser.parse_args()
    if args.length <= 4 * args.layers:
        parser.error(f"--length {args.length}: must be more than {4 * args.layers}, four times --layers")
    # Create the folder before the measurement, which takes minutes, so that an error is raised early.
    args.out.mkdir(parents=True, exist_ok=True)
    found = {
        (stack, variant): measure(args, stack, variant)
        for stack in STACKS
        for variant in VARIANTS
        if (stack, variant) != (PLAIN, "without √½")  # no residual connections, so no sums to scale
    }
    write(args.out / "variance.tsv", found)
    draw(args.out / "variance.png", found)
    print("| stack | | activations, top / bottom | gradients, bottom / top |")
    print("|---|---|---|---|")
    for (stack, variant), variances in found.items():
        activations, gradients = zip(*variances, strict=True)
        changes = activations[-1] / activations[0], gradients[0] / gradients[-1]
        print(f"| {stack} | {variant} | {changes[0]:.2g} | {changes[1]:.2g} |")


def measure(args: Namespace, stack: str, variant: str) -> Variances:
    """Run a stack forward, and propagate a random gradient backward through it."""
    outputs: list[Tensor] = []

    def keep(module: object, inputs: object, output: Tensor) -> None:
        output.retain_grad()
        outputs.append(output)

    with sums_as_in(variant):
        model = build(args, variant, residual=stack != PLAIN)
        source, target = torch.randint(4, WORDS, (2, 1, args.length))
        side = model.decoder if stack == DECODER else model.encoder
        # Input of the stack, (1, T, C), and outputs of its layers, (T, 1, C).
        hooks = [module.register_forward_hook(keep) for module in (side.from_embedding, *side.shortcuts)]
        encoded = model.encoder(source)
        result = encoded.keys if side is model.encoder else side.extract_features(target, encoded)[0]
        for hook in hooks:
            hook.remove()
    result.backward(torch.randn_like(result))
    # Words near the ends are left out: the padding beyond the ends has no variance, and each layer of kernel 3 spreads
    # the effect of the padding by up to two words.
    inner = slice(2 * args.layers, -2 * args.layers)
    return [(variance(output, inner), variance(output.grad, inner)) for output in outputs]


def variance(x: Tensor, inner: slice) -> float:
    """Return the variance over all units and over all words of a sentence that are not near its ends."""
    return float(x.flatten(0, 1)[inner].var())


def build(args: Namespace, variant: str, residual: bool) -> ConvS2SModel:
    """Build an untrained model; all variants get the same random numbers."""
    torch.manual_seed(args.seed)
    dictionary = Dictionary()
    for index in range(WORDS - len(dictionary)):
        dictionary.add_symbol(f"w{index}")
    cfg = Namespace(
        dropout=args.dropout,
        max_source_positions=args.length,
        max_target_positions=args.length,
        **dict.fromkeys(("encoder_layers", "decoder_layers"), f"[({args.width}, 3, {int(residual)})] * {args.layers}"),
        **dict.fromkeys(("encoder_embed_dim", "decoder_embed_dim", "decoder_out_embed_dim"), args.width),
    )
    ARCH_CONFIG_REGISTRY["convs2s_wmt_en_ro"](cfg)
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    model = ConvS2SModel.build_model(cfg, task)
    gain = {"without the factor 4": 1 / 4, "without the factor p": 1 / (1 - args.dropout)}.get(variant, 1.0)
    for name, parameter in model.named_parameters():
        if ".convolutions." in name and name.endswith(MAGNITUDE):
            parameter.data.mul_(math.sqrt(gain))
    return model


@contextmanager
def sums_as_in(variant: str) -> Iterator[None]:
    """In this context, set the factor √½, which follows each sum, to 1 if the variant is "without √½"."""
    with ExitStack() as stack:
        if variant == "without √½":
            for module in (layers, model_module):
                stack.enter_context(patch.object(module, "SQRT_HALF", 1.0))
        yield


def write(path: Path, found: dict[tuple[str, str], Variances]) -> None:
    """Write one line for each layer of each stack."""
    lines = ["\t".join(("stack", "variant", "layer", *QUANTITIES))]
    for (stack, variant), variances in found.items():
        lines += [f"{stack}\t{variant}\t{layer}\t{x:.6g}\t{grad:.6g}" for layer, (x, grad) in enumerate(variances)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def draw(path: Path, found: dict[tuple[str, str], Variances]) -> None:
    """Draw each variance relative to the variance at the start of the forward or backward pass."""
    figure = new_figure(10, 9)
    rows = figure.subplots(len(STACKS), len(QUANTITIES), sharex=True, sharey="row")
    for stack, panels in zip(STACKS, rows, strict=True):
        for index, (panel, start) in enumerate(zip(panels, (0, -1), strict=True)):
            for variant, (colour, mark) in VARIANTS.items():
                variances = [pair[index] for pair in found.get((stack, variant), [])]
                relative = [value / variances[start] for value in variances]
                panel.plot(relative, color=colour, marker=mark, markersize=4, label=variant)
            panel.set(yscale="log", title=f"{stack}: {QUANTITIES[index]}")
            panel.grid(alpha=0.3)
        panels[0].set_ylabel("variance relative to the input")
        panels[1].set_ylabel("variance relative to the top layer")
    for panel in rows[-1]:
        panel.set(xlabel="layer", xticks=range(0, len(found[ENCODER, "as in the paper"]), 5))
    rows[0][0].legend()
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
