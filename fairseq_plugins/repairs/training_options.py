"""Values of the options of training that fairseq takes and nothing can be trained with."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from fairseq_plugins.common.literal import literal

# The least and the greatest value of options; fairseq checks none of them, and trains nothing, NaN or something else.
ANY, NATURAL, POSITIVE, FRACTION = (-math.inf, math.inf), (0, math.inf), (1, math.inf), (0, 1)
LIMITS: dict[str, tuple[float, float]] = {
    "seed": (0, 2**32 - 1),
    **dict.fromkeys(["clip_norm", "stop_min_lr", "stop_time_hours"], ANY),
    "warmup_init_lr": (-1, math.inf),  # -1 is the default
    **dict.fromkeys(["adam_eps", "lr", "min_loss_scale", "weight_decay"], NATURAL),
    **dict.fromkeys(["max_epoch", "max_update", "max_valid_steps", "num_workers", "save_interval_updates"], NATURAL),
    **dict.fromkeys(["validate_interval_updates", "warmup_updates"], NATURAL),
    **dict.fromkeys(["batch_size_valid", "max_tokens_valid", "update_freq"], POSITIVE),
    **dict.fromkeys(["fp16_init_scale", "fp16_scale_window", "log_interval", "total_num_update"], POSITIVE),
    **dict.fromkeys(["max_source_positions", "max_target_positions", "save_interval", "validate_interval"], POSITIVE),
    **dict.fromkeys(["required_batch_size_multiple", "required_seq_len_multiple"], POSITIVE),
    **dict.fromkeys(["activation_dropout", "attention_dropout", "dropout", "relu_dropout"], FRACTION),
    **dict.fromkeys(["ema_decay", "fp16_scale_tolerance", "label_smoothing", "momentum"], FRACTION),
}

# Metrics of validation by which a model is better, and those by which it is worse, the higher they are.
HIGHER_IS_BETTER = ("bleu", "sacrebleu", "chrf", "rouge", "accuracy")
LOWER_IS_BETTER = ("loss", "ppl", "wer", "uer", "cer", "ter")
COSTS = ("risk", "best", "oracle")  # of sequence_risk


def beyond_its_limits(o: Any) -> Iterator[str]:
    """Yield the options whose values are no numbers that they can have, and these values."""
    for name, (least, most) in LIMITS.items():
        given = getattr(o, name)
        for value in given if isinstance(given, list) else [given]:
            if not isinstance(value, int | float) or (math.isfinite(value) and least <= value <= most):
                continue
            greatest = "" if most == math.inf else f" and at most {most}"
            limits = f"at least {least}{greatest}" if math.isfinite(value) else "finite"
            yield f"--{name.replace('_', '-')} must be {limits}, got {value}"
    for name, value in o.values.items():
        if name not in LIMITS and isinstance(value, float) and math.isnan(value):
            yield f"--{name.replace('_', '-')} must be finite, got nan"


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
