"""Allowed ranges of options; fairseq itself accepts values that no training or search can use."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from numbers import Integral, Real
from typing import Any

from fairseq_plugins.common.options import FINITE, FRACTION, NOT_NEGATIVE, SIZE, Range, flag, literal

# Ranges of training options; fairseq checks none of them.
TRAINING: dict[str, Range] = {
    "seed": Range(0, 2**32 - 1),
    **dict.fromkeys(["clip_norm", "stop_min_lr", "stop_time_hours"], FINITE),
    "warmup_init_lr": Range(-1),  # -1 is the default
    **dict.fromkeys(["adam_eps", "lr", "min_loss_scale", "weight_decay"], NOT_NEGATIVE),
    **dict.fromkeys(
        ["max_epoch", "max_update", "max_valid_steps", "num_workers", "save_interval_updates"], NOT_NEGATIVE
    ),
    **dict.fromkeys(["validate_interval_updates", "warmup_updates"], NOT_NEGATIVE),
    **dict.fromkeys(["batch_size_valid", "max_tokens_valid", "update_freq"], SIZE),
    **dict.fromkeys(["fp16_init_scale", "fp16_scale_window", "log_interval", "total_num_update"], SIZE),
    **dict.fromkeys(["max_source_positions", "max_target_positions", "save_interval", "validate_interval"], SIZE),
    **dict.fromkeys(["required_batch_size_multiple", "required_seq_len_multiple"], SIZE),
    **dict.fromkeys(["activation_dropout", "attention_dropout", "dropout", "relu_dropout"], FRACTION),
    **dict.fromkeys(["ema_decay", "fp16_scale_tolerance", "label_smoothing", "momentum"], FRACTION),
}


def whole(least: int) -> tuple[Callable[[Any], bool], str]:
    """Return a test for integers of at least ``least``, and its description."""
    return lambda n: isinstance(n, Integral) and int(n) >= least, f"must be a whole number and at least {least}"


# For each option of a search, a test of its value and a description of the test.
SEARCH: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(["beam", "nbest"], whole(1)),
    **dict.fromkeys(["min_len", "max_len_b", "prefix_size", "no_repeat_ngram_size"], whole(0)),
    **dict.fromkeys(["lenpen", "word_penalty", "lm_weight"], (math.isfinite, "must be finite")),
    "sampling_topk": whole(-1),
    "max_len_a": (lambda x: 0 <= x < math.inf, "must be finite and at least 0"),
    "unkpen": (lambda x: x > -math.inf, "must be a number above -inf"),
    "temperature": (lambda x: 0 < x < math.inf, "must be finite and above 0"),
    "sampling_topp": (lambda x: x == -1 or 0 <= x <= 1, "must be in [0, 1]"),
    "diversity_rate": (lambda x: x == -1 or 0 <= x < math.inf, "must be finite and at least 0"),
}

# Validation metrics, by the last part of their names.
HIGHER_IS_BETTER = ("bleu", "sacrebleu", "chrf", "rouge", "accuracy")
LOWER_IS_BETTER = ("loss", "ppl", "wer", "uer", "cer", "ter")
RISK_METRICS = ("risk", "best", "oracle")  # of sequence_risk


def outside_search_range(option: str, holds: Callable[[Any], bool], o: Any) -> bool:
    """Return whether an option's value is not a number, or is rejected by the test ``holds``."""
    value = getattr(o, option)
    return value is not None and (isinstance(value, bool) or not isinstance(value, Real) or not holds(value))


def outside_training_range(o: Any) -> Iterator[str]:
    """Yield an error message for each number that is NaN or outside the range of its option."""
    for name, given in o.values.items():
        allowed = TRAINING.get(name, FINITE)
        for value in given if isinstance(given, list) else [given]:
            if not isinstance(value, int | float):
                continue
            if value not in allowed if name in TRAINING else value != value:
                yield f"{flag(name)} must be {allowed}, got {value}"


def wrong_adam_betas(o: Any) -> bool:
    """Return whether ``--adam-betas`` has a value other than two numbers in [0, 1)."""
    if o.adam_betas is None:
        return False
    try:
        first, second = literal(o.adam_betas) if isinstance(o.adam_betas, str) else o.adam_betas
        return not (0 <= first < 1 and 0 <= second < 1)
    except (TypeError, ValueError):
        return True


def wrong_direction(o: Any) -> str | None:
    """Return advice if ``--maximize-best-checkpoint-metric`` contradicts the metric."""
    metric = str(o.best_checkpoint_metric)
    kind = metric.rpartition("_")[2]  # nll_loss is a loss
    lower = kind in LOWER_IS_BETTER or (metric in RISK_METRICS and o.criterion == "sequence_risk")
    if kind in HIGHER_IS_BETTER and not o.maximize_best_checkpoint_metric:
        return "is better when it is higher; add"
    if lower and o.maximize_best_checkpoint_metric:
        return "is better when it is lower; leave out"
    return None
