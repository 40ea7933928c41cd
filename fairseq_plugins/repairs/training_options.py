"""Values of the options of training that fairseq takes and nothing can be trained with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fairseq_plugins.common.literal import literal
from fairseq_plugins.common.options import FINITE, FRACTION, NOT_NEGATIVE, SIZE, Range, flag

# fairseq checks none of these values: it trains nothing, NaN or something else.
LIMITS: dict[str, Range] = {
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

# Metrics of validation by which a model is better, and those by which it is worse, the higher they are.
HIGHER_IS_BETTER = ("bleu", "sacrebleu", "chrf", "rouge", "accuracy")
LOWER_IS_BETTER = ("loss", "ppl", "wer", "uer", "cer", "ter")
COSTS = ("risk", "best", "oracle")  # of sequence_risk


def beyond_its_limits(o: Any) -> Iterator[str]:
    """Yield a sentence for each option whose value is outside its limits, or NaN."""
    for name, given in o.values.items():
        allowed = LIMITS.get(name, FINITE)
        for value in given if isinstance(given, list) else [given]:
            if not isinstance(value, int | float):
                continue
            if value not in allowed if name in LIMITS else value != value:
                yield f"{flag(name)} must be {allowed}, got {value}"


def no_decay_rates(o: Any) -> bool:
    """Whether the betas of Adam are not two numbers from 0 to less than 1."""
    if o.adam_betas is None:
        return False
    try:
        first, second = literal(o.adam_betas) if isinstance(o.adam_betas, str) else o.adam_betas
        return not (0 <= first < 1 and 0 <= second < 1)
    except (TypeError, ValueError):
        return True


def wrong_direction(o: Any) -> str | None:
    """Return the better direction of the metric that chooses the best checkpoint, where another one is asked for."""
    metric = str(o.best_checkpoint_metric)
    kind = metric.rpartition("_")[2]  # nll_loss
    lower = kind in LOWER_IS_BETTER or (metric in COSTS and o.criterion == "sequence_risk")
    if kind in HIGHER_IS_BETTER and not o.maximize_best_checkpoint_metric:
        return "is better when it is higher; add"
    if lower and o.maximize_best_checkpoint_metric:
        return "is better when it is lower; leave out"
    return None
