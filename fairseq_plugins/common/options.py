"""Options of models: defaults, allowed ranges, architectures (named sets of options), and lists of layers.

In a configuration class, an option whose value differs between architectures has the default None.  hydra applies
defaults before fairseq calls the architecture's function.  The architecture's function replaces only None, because it
cannot distinguish any other default from a user's value.
"""

from __future__ import annotations

import ast
import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple

from fairseq.dataclass import FairseqDataclass
from fairseq.models import register_model_architecture
from omegaconf import DictConfig

Options = Namespace | DictConfig  # a model's options


def architecture(options: Any) -> Any:
    """Return the name of a model's architecture or None; fairseq stores the name as ``arch`` or as ``_name``."""
    return getattr(options, "arch", None) or getattr(options, "_name", None)


def flag(option: str) -> str:
    """Return the option in command-line spelling."""
    return f"--{option.replace('_', '-')}"


def fill_in(args: Options, values: Mapping[str, Any]) -> None:
    """Assign the given values to options that are unset."""
    for option, value in values.items():
        # An unset option is None, and omegaconf 2.0 returns None for an unknown option.
        if getattr(args, option, None) is None:
            setattr(args, option, value)


def register_presets(model: str, config: type[FairseqDataclass], presets: Mapping[str, Mapping[str, Any]]) -> None:
    """Register the architectures of a model.

    The value of an option is the user's, or else the architecture's in ``presets``, or else the default of the
    configuration class.
    """
    defaults = {name: value for name, value in vars(config()).items() if not name.startswith("_")}
    for architecture, values in presets.items():
        register_model_architecture(model, architecture)(partial(fill_in, values={**defaults, **values}))


@dataclass(frozen=True)
class Range:
    """A range of finite numbers, which excludes its lower bound if ``above`` is true."""

    least: float
    most: float = math.inf
    above: bool = False

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, int | float) or not -math.inf < value < math.inf:
            return False
        return (self.least < value if self.above else self.least <= value) and value <= self.most

    def __str__(self) -> str:
        if self.least == -math.inf:
            return "finite"
        least = f"above {self.least}" if self.above else f"at least {self.least}"
        return f"finite and {least}" if self.most == math.inf else f"{least} and at most {self.most}"


POSITIVE = Range(0, above=True)
NOT_NEGATIVE = Range(0)
SIZE = Range(1)
FINITE = Range(-math.inf)
FRACTION = Range(0, 1)


def option(default: Any, help_: str | None = None, allowed: Range | None = None) -> Any:
    """Return a field of a configuration class, with its help and the range that `check_ranges` allows."""
    metadata = {"help": help_, "range": allowed}
    return field(default=default, metadata={name: value for name, value in metadata.items() if value is not None})


def check_ranges(cfg: Any, config: type[FairseqDataclass]) -> None:
    """Refuse options outside the ranges that their configuration class declares."""
    for each in fields(config):
        allowed, value = each.metadata.get("range"), getattr(cfg, each.name, None)
        if allowed is not None and value is not None and value not in allowed:
            raise ValueError(f"{flag(each.name)} must be {allowed}, got {value}")


# The largest number of elements in one list.
_MAX_LENGTH = 1000
# The largest number of values in a list, including the values in its nested lists.
_MAX_SIZE = 10_000
# The largest number of characters in an option.  Python's parser needs over 1000 bytes per character, and crashes on
# deep nesting.
_MAX_TEXT = 100_000


def literal(text: str) -> Any:
    """Return the value of a Python literal, in which ``+`` may join lists and ``*`` may repeat a list.

    Tuples can be joined and repeated like lists.  For example, an option of fairseq's fconv may have the value
    ``[(512, 3)] * 9 + [(1024, 3, 1)] * 4``.  fairseq passes this value to ``eval``, which runs any code.
    """
    if not isinstance(text, str):
        raise TypeError(f"expected text, got {text!r}")
    if len(text) > _MAX_TEXT:
        raise ValueError(f"{text[:100]!r}... has {len(text)} characters, at most {_MAX_TEXT} are allowed; shorten it")
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(
            f"{text[:100]!r} is not a literal of at most {_MAX_LENGTH} elements; write numbers, quoted text, or lists "
            "of them, such as '[1, 2] * 3'"
        ) from error


def _value(node: ast.expr) -> Any:
    match node:
        case ast.BinOp(left, ast.Add() | ast.Mult() as operation, right):
            return _combine(_value(left), operation, _value(right))
        case ast.List(elements):
            return [_value(element) for element in elements]
        case ast.Tuple(elements):
            return tuple(_value(element) for element in elements)
    return ast.literal_eval(node)


def _combine(left: Any, operation: ast.operator, right: Any) -> Any:
    if isinstance(operation, ast.Mult):
        times, values = (left, right) if isinstance(left, int) else (right, left)
        few = type(times) is int and abs(times) <= _MAX_LENGTH
        if few and isinstance(values, list | tuple) and _fits(values, times):
            return values * times
    elif isinstance(left, list | tuple) and type(left) is type(right) and _fits([*left, *right]):
        return type(left)([*left, *right])
    raise ValueError(
        f"+ and * must return a list of at most {_MAX_LENGTH} elements and at most {_MAX_SIZE} nested values"
    )


def _fits(values: Any, times: int = 1) -> bool:
    return len(values) * times <= _MAX_LENGTH and _size(values) * times <= _MAX_SIZE


def _size(value: Any) -> int:
    return 1 + sum(map(_size, value)) if isinstance(value, list | tuple) else 1


MOST_LAYERS = 200  # without a limit, a hostile checkpoint could exhaust the memory


class ConvolutionSpec(NamedTuple):
    """A convolutional layer: its output width, kernel width, and residual connection."""

    width: int
    kernel: int
    # Number of layers that the residual connection spans: 1 if the connection starts at the layer's own input, or 0 if
    # the layer has no residual connection.
    residual: int = 1


def input_widths(layers: Sequence[ConvolutionSpec]) -> list[tuple[int, int]]:
    """Return, for each layer, its input width and the width at the start of its residual connection.

    The input of the first layer has the same width as its output.  Without a residual connection, both widths are
    the input width.
    """
    widths = [layer.width for layer in layers[:1]] + [layer.width for layer in layers]
    return [(widths[i], widths[i + 1 - max(layer.residual, 1)]) for i, layer in enumerate(layers)]


def parse_convolutions(text: str, option: str, may_be_empty: bool = False) -> list[ConvolutionSpec]:
    """Parse ``[(width, kernel), ...]`` or ``[(width, kernel, residual), ...]``, the value of ``option``."""
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
                f"at most {len(specs) + 1} are possible, got {text!r}; lower the layer's third number"
            )
        specs.append(spec)
    return specs


def parse_attention(text: str, layers: int) -> list[bool]:
    """Parse --decoder-attention: ``True`` for all layers, or a list with one truth value per layer."""
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
