"""Stacks of layers as fairseq writes them on the command line and in checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from fairseq_plugins.common.literal import literal

MOST_LAYERS = 200  # a file of some kilobytes may ask for any number, and all are built before their weights are missed


class ConvolutionSpec(NamedTuple):
    """One convolutional layer: output width, kernel width, and how many layers back its residual connection starts.

    A residual of 1 is the layer's own input, 0 is no residual connection.
    """

    width: int
    kernel: int
    residual: int = 1


def input_widths(layers: Sequence[ConvolutionSpec]) -> list[tuple[int, int]]:
    """For each layer the width of its input, and that of where its residual connection starts: its input, if none does.

    The input of the first layer is as wide as its output.
    """
    widths = [layer.width for layer in layers[:1]] + [layer.width for layer in layers]
    return [(widths[i], widths[i + 1 - max(layer.residual, 1)]) for i, layer in enumerate(layers)]


def parse_convolutions(text: str, option: str, may_be_empty: bool = False) -> list[ConvolutionSpec]:
    """Read ``[(width, kernel), ...]`` or ``[(width, kernel, residual), ...]``.

    Args:
        text: the list in fairseq's syntax.
        option: the name of the option, for the error.
        may_be_empty: whether the list may be empty.

    Raises:
        ValueError: the text is not such a list, of `MOST_LAYERS` at most; the message shows what was expected.
    """
    expected = (
        f"{option}: expected a list of (width, kernel) or (width, kernel, residual) layers of positive whole numbers, "
        f"such as '[(512, 3)] * 9 + [(1024, 3, 1)] * 4', but got {text!r}"
    )
    layers = _parse(text, expected)
    if not isinstance(layers, list) or not (layers or may_be_empty):
        raise ValueError(expected)
    if len(layers) > MOST_LAYERS:
        raise ValueError(f"{option}: {len(layers)} layers, and {MOST_LAYERS} are the most")
    specs: list[ConvolutionSpec] = []
    for layer in layers:
        if not isinstance(layer, tuple) or len(layer) not in (2, 3) or not all(type(size) is int for size in layer):
            raise ValueError(expected)
        spec = ConvolutionSpec(*layer)
        if spec.width < 1 or spec.kernel < 1 or spec.residual < 0:
            raise ValueError(expected)
        if spec.residual > len(specs) + 1:
            raise ValueError(
                f"{expected}: the residual connection of layer {len(specs) + 1} starts {spec.residual} layers back, "
                f"but only {len(specs)} layers stand before it"
            )
        specs.append(spec)
    return specs


def parse_attention(text: str, layers: int) -> list[bool]:
    """Read which decoder layers attend: ``True`` (all of them) or a list with one truth value per layer.

    Raises:
        ValueError: the text is neither, its length is not ``layers``, or no layer attends.
    """
    expected = (
        f"--decoder-attention: expected True or a list of {layers} truth values, at least one of them True, "
        f"such as '[True] * {layers}', but got {text!r}"
    )
    flags = _parse(text, expected)
    if isinstance(flags, bool):
        flags = [flags] * layers
    is_valid = isinstance(flags, list) and len(flags) == layers and all(type(flag) is bool for flag in flags)
    if not is_valid or not any(flags):
        raise ValueError(expected)
    return flags


def _parse(text: str, expected: str) -> Any:
    try:
        return literal(text)
    except ValueError as error:
        raise ValueError(expected) from error
