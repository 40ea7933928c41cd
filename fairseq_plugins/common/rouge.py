"""ROUGE by rouge-score, an optional dependency."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any


def rouge_scorer(names: Sequence[str]) -> Any:
    """Return rouge-score's scorer with stemming.

    Raises:
        ValueError: rouge-score is not installed.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer  # noqa: PLC0415 (an optional dependency)
    except ImportError as error:
        raise ValueError("ROUGE needs the package rouge-score: pip install rouge-score") from error
    return RougeScorer(names, use_stemmer=True)


def can_score(words: Collection[str]) -> bool:
    """Return whether at least a tenth of the words contain a to z or a digit; rouge-score ignores other characters."""
    return sum(bool(re.search("[a-z0-9]", word.lower())) for word in words) >= len(words) / 10
