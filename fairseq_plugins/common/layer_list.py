"""Parsers of lists of layers in fairseq's syntax, which command lines and checkpoints contain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from fairseq_plugins.common.literal import literal

MOST_LAYERS = 200  # a hostile checkpoint could otherwise exhaust the memory


class ConvolutionSpec(NamedTuple):
    """The specification of one convolutional layer.

    Attributes:
        width: output width.
        kernel: kernel width.
        residual: number of layers that the residual connection spans: 1 if it starts at the layer's own input, 0 if
            there is no residual connection.
    """

    width: int
    kernel: int
    residual: int = 1


def input_widths(layers: Sequence[ConvolutionSpec]) -> list[tuple[int, int]]:
    """Return, for each layer, its input width and the width at the start of its residual connection.

    The input of the first layer has the same width as its output.  Without a residual connection, the second number is
    the input width.
    """
    widths = [layer.width for layer in layers[:1]] + [layer.width for layer in layers]
    return [(widths[i], widths[i + 1 - max(layer.residual, 1)]) for i, layer in enumerate(layers)]


def parse_convolutions(text: str, option: str, may_be_empty: bool = False) -> list[ConvolutionSpec]:
    """Parse ``[(width, kernel), ...]`` or ``[(width, kernel, residual), ...]``.

    Args:
        text: list in fairseq's syntax.
        option: name of the option, for the error message.
        may_be_empty: whether an empty list is allowed.

    Raises:
        ValueError: the text is not such a list, or has more than `MOST_LAYERS` layers.
    """
    expected = (
        f"{option}: expected a list of (width, kernel) or (width, kernel, residual) layers of positive whole numbers, "
        f"such as '[(512, 3)] * 9 + [(1024, 3, 1)] * 4', but got {text!r}"
    )
    layers = _parse(text, expected)
    if not isinstance(layers, list) or not (layers or may_be_empty):
        raise ValueError(expected)
    if len(layers) > MOST_LAYERS:
        raise ValueError(f"{option}: {len(layers)} layers, at most {MOST_LAYERS} are allowed")
    specs: list[ConvolutionSpec] = []
    for layer in layers:
        if not isinstance(layer, tuple) or len(layer) not in (2, 3) or not all(type(size) is int for size in layer):
            raise ValueError(expected)
        spec = ConvolutionSpec(*layer)
        if spec.width < 1 or spec.kernel < 1 or spec.residual < 0:
            raise ValueError(expected)
        if spec.residual > len(specs) + 1:
            raise ValueError(
                f"{option}: the residual connection of layer {len(specs) + 1} starts {spec.residual} layers back, "
                f"at most {len(specs) + 1} are possible, got {text!r}; lower its third number"
            )
        specs.append(spec)
    return specs


def parse_attention(text: str, layers: int) -> list[bool]:
    """Parse which decoder layers have attention: ``True`` for all layers, or a list with one truth value per layer.

    Raises:
        ValueError: the text is malformed, has a wrong length, or selects no layer.
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
