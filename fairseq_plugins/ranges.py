"""Ranges of numeric options, which a configuration declares beside their help."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from fairseq.dataclass import FairseqDataclass

__all__ = ["FRACTION", "NOT_NEGATIVE", "POSITIVE", "SIZE", "Range", "check_ranges"]


@dataclass(frozen=True)
class Range:
    """Finite numbers from the least to the most, or from above the least."""

    least: float
    most: float = math.inf
    above: bool = False

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, int | float) or not -math.inf < value < math.inf:
            return False
        return (self.least < value if self.above else self.least <= value) and value <= self.most

    def __str__(self) -> str:
        least = f"above {self.least}" if self.above else f"at least {self.least}"
        return f"finite and {least}" if self.most == math.inf else f"{least} and at most {self.most}"


POSITIVE = Range(0, above=True)
NOT_NEGATIVE = Range(0)
SIZE = Range(1)
FRACTION = Range(0, 1)


def check_ranges(cfg: Any, config: type[FairseqDataclass]) -> None:
    """Refuse numbers outside the ranges that a configuration's fields have in their metadata; None is unset.

    Args:
        cfg: the options.
        config: their class.

    Raises:
        ValueError: names the option, its range and its value.
    """
    for each in fields(config):
        allowed, value = each.metadata.get("range"), getattr(cfg, each.name, None)
        if allowed is not None and value is not None and value not in allowed:
            raise ValueError(f"--{each.name.replace('_', '-')} must be {allowed}, got {value}")
