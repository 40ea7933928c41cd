"""The table of refused options, checked on command lines, in hydra configurations and in calls from Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from fairseq.dataclass.configs import FairseqConfig
from fairseq.registry import REGISTRIES
from omegaconf import MISSING, DictConfig, OmegaConf

from fairseq_plugins.common.options import FINITE, FRACTION, NOT_NEGATIVE, POSITIVE, SIZE, Range, flag, literal

# The first of these options that a parser defines shows which command the parser belongs to.
COMMAND_OF_OPTION = {
    "buffer_size": "interactive",
    "beam": "generate",
    "max_epoch": "train",
    "context_window": "eval-lm",
    "path": "validate",
}
GENERATE, INTERACTIVE, TRAIN, VALIDATE = ("generate",), ("interactive",), ("train",), ("validate",)
TRANSLATE = (*GENERATE, *INTERACTIVE)
COMMANDS = (*TRANSLATE, *TRAIN, *VALIDATE)
SEARCHES = (*TRANSLATE, "task.build_generator")
HUB = ("from_pretrained", "hub.generate")  # fairseq's Python interface for translation

# Ranges of training options; fairseq checks none of them.
TRAINING: dict[str, Range] = {
    "seed": Range(0, 2**32 - 1),
    "warmup_init_lr": Range(-1),  # -1 is the default
    **dict.fromkeys(["clip_norm", "stop_min_lr", "stop_time_hours"], FINITE),
    **dict.fromkeys(["adam_eps", "lr", "max_epoch", "max_update", "max_valid_steps", "min_loss_scale"], NOT_NEGATIVE),
    **dict.fromkeys(["num_workers", "save_interval_updates", "validate_interval_updates"], NOT_NEGATIVE),
    **dict.fromkeys(["warmup_updates", "weight_decay"], NOT_NEGATIVE),
    **dict.fromkeys(["batch_size_valid", "max_tokens_valid", "update_freq", "log_interval", "total_num_update"], SIZE),
    **dict.fromkeys(["fp16_init_scale", "fp16_scale_window", "save_interval", "validate_interval"], SIZE),
    **dict.fromkeys(["max_source_positions", "max_target_positions"], SIZE),
    **dict.fromkeys(["required_batch_size_multiple", "required_seq_len_multiple"], SIZE),
    **dict.fromkeys(["activation_dropout", "attention_dropout", "dropout", "relu_dropout"], FRACTION),
    **dict.fromkeys(["ema_decay", "fp16_scale_tolerance", "label_smoothing", "momentum"], FRACTION),
}

# Ranges of integer options (WHOLE) and of real-valued search options (SEARCH).  An option's default, such as -1, is
# accepted even if the default is outside the option's range.
WHOLE: dict[tuple[str, ...], dict[str, Range]] = {
    COMMANDS: dict.fromkeys(["max_tokens", "batch_size"], SIZE),
    SEARCHES: {
        **dict.fromkeys(["beam", "nbest"], SIZE),
        **dict.fromkeys(["min_len", "max_len_b", "prefix_size", "no_repeat_ngram_size", "sampling_topk"], NOT_NEGATIVE),
    },
}
SEARCH: dict[str, Range] = {
    **dict.fromkeys(["lenpen", "word_penalty", "lm_weight"], FINITE),
    **dict.fromkeys(["max_len_a", "diversity_rate"], NOT_NEGATIVE),
    "temperature": POSITIVE,
    "sampling_topp": FRACTION,
}

# Validation metrics.  Only the part of a metric's name after the last underscore is compared, so ``loss`` includes
# ``nll_loss``.
HIGHER_IS_BETTER = ("bleu", "sacrebleu", "chrf", "rouge", "accuracy")
LOWER_IS_BETTER = ("loss", "ppl", "wer", "uer", "cer", "ter")
RISK_METRICS = ("risk", "best", "oracle")  # of sequence_risk

# Options that commands or functions accept but ignore, each with a replacement.
SHARDS, HALF, INTO_FILE = (
    "num_shards shard_id",
    "bf16 memory_efficient_bf16 amp",
    "redirect the standard output into a file",
)
UNREAD: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (INTERACTIVE, "lm_path prefix_size score_reference scoring quiet gen_subset", "use fairseq-generate"),
    (INTERACTIVE, "sacrebleu", "use fairseq-generate --scoring sacrebleu"),
    ((*INTERACTIVE, *VALIDATE), "results_path", INTO_FILE),
    ((*TRANSLATE, *VALIDATE), "log_file", INTO_FILE),
    ((*TRANSLATE, *VALIDATE), "max_valid_steps", "leave it out"),
    (TRANSLATE, SHARDS, "use fairseq-generate --distributed-world-size N --distributed-rank I for part I of N"),
    (TRANSLATE, HALF, "use --fp16 on a GPU, and --task translation_fast --cpu-dtype bfloat16 on a CPU"),
    (TRANSLATE, "train_subset valid_subset", "use fairseq-generate --gen-subset"),
    (TRANSLATE, "restore_file finetune_from_model save_dir", "use --path for the checkpoint"),
    ((*VALIDATE, *TRAIN), SHARDS, "use --distributed-world-size"),
    (VALIDATE, HALF, "use --fp16 on a GPU"),
    (VALIDATE, "train_subset gen_subset", "use --valid-subset"),
    (VALIDATE, "scoring", "leave it out: validation uses the training's criterion"),
    (VALIDATE, "quiet", "leave it out"),
    (TRAIN, "gen_subset", "use --valid-subset"),
    (TRAIN, "scoring", "use --eval-bleu to validate with BLEU"),
    (HUB, "nbest", "leave it out: generate returns the whole beam, the best translation first"),
    (HUB, "replace_unk", "use fairseq-interactive --replace-unk"),
    (HUB, "lm_path lm_weight", "use fairseq-generate --lm-path"),
    (HUB, "sacrebleu", "use fairseq-generate --scoring sacrebleu"),
    (HUB, "prefix_size", 'give inference_step_args={{"prefix_tokens": ...}} to generate'),
    (HUB, "score_reference", "use fairseq-generate --score-reference: score() takes no source"),
    (("from_pretrained",), "beam", "give it to the method translate or generate of the loaded model"),
    (("from_pretrained",), "fp16", "call half() on the result of from_pretrained"),
    (("from_pretrained",), "model_overrides", "give the options themselves to from_pretrained"),
    (("hub.generate",), "retain_dropout", "give it to from_pretrained"),
)

DEFAULTS = {option: registry["default"] for option, registry in REGISTRIES.items()} | {
    option: field.default
    for section in FairseqConfig.__dataclass_fields__.values()
    for option, field in getattr(section.type, "__dataclass_fields__", {}).items()
    if not str(field.default).startswith("${")  # a reference to another option is not a default
}


class GivenOptions:
    """Options as attributes; a missing option is None.

    The options come from a command line, from a task, or from a whole configuration.
    """

    def __init__(self, *parts: Any) -> None:
        self.values: dict[str, Any] = {}
        for part in parts:
            for name, value in values_of(part).items():
                section = {each: of for each, of in values_of(value).items() if not str(of).startswith("${")}
                if "_name" in section:
                    self.values |= section
                self.values[name] = section.get("_name", value)

    def __getattr__(self, name: str) -> Any:
        return self.values.get(name)


def values_of(part: Any) -> dict[str, Any]:
    """Return the options in a configuration, a dataclass or a namespace."""
    if isinstance(part, DictConfig):
        part = OmegaConf.to_container(part, resolve=False, enum_to_str=True)
    return dict(part) if isinstance(part, Mapping) else dict(getattr(part, "__dict__", {}))


class Refusal(NamedTuple):
    """One row of the table of refused options.

    Attributes:
        commands: commands and functions to which the row applies.
        found: a function that returns the fault in the options, or a false value if there is none.
        sentence: the error message in the form ``--option: problem, got value; fix``.  The message is a format string
            with three variables: ``o`` (the options), ``found`` (the fault) and ``command`` (the name of the command).
    """

    commands: tuple[str, ...]
    found: Callable[[GivenOptions], Any]
    sentence: str


def given(option: str, o: GivenOptions) -> bool:
    """Return whether an option differs from its default."""
    return getattr(o, option) not in (None, DEFAULTS.get(option))


def unread() -> Iterator[Refusal]:
    """Yield a row for each option that a command or function ignores."""
    for commands, options, fix in UNREAD:
        for option in options.split():
            name = flag(option) if commands[0] in COMMANDS else option
            sentence = f"{name} does nothing in {{command}}, got {{o.{option}!r}}; {fix}"
            yield Refusal(commands, partial(given, option), sentence)


def other_in_validation(option: str, o: GivenOptions) -> bool:
    """Return whether the validation variant of ``option`` is set to another value than ``option`` itself.

    For example, ``--batch-size-valid`` is the validation variant of ``--batch-size``.  Unless the command line
    sets ``--batch-size-valid``, fairseq's parser sets ``--batch-size-valid`` to the value of ``--batch-size``.
    """
    return getattr(o, f"{option}_valid") not in (None, getattr(o, option))


def missing_of_a_part(o: GivenOptions) -> str | None:
    """Return a message for the first missing option that a component requires (``--bpe-codes`` of subword_nmt)."""
    for kind, registry in REGISTRIES.items():
        fields = getattr(registry["dataclass_registry"].get(getattr(o, kind)), "__dataclass_fields__", {})
        for option, field in fields.items():
            if field.default == MISSING and getattr(o, option) in (None, MISSING):
                return f"{flag(kind)} {getattr(o, kind)} needs {flag(option)}"
    return None


def several_searches(o: GivenOptions) -> str | None:
    """Return the options that choose a search, joined by "and", if more than one of them is set; otherwise None."""
    chosen = {
        "--sampling": o.sampling,
        "--constraints": o.constraints,
        "--match-source-len": o.match_source_len,
        "--diversity-rate": o.diversity_rate is not None and o.diversity_rate >= 0,
    }
    found = [option for option, value in chosen.items() if value]
    return " and ".join(found) if len(found) > 1 else None


def outside(option: str, kind: type, allowed: Range, o: GivenOptions) -> bool:
    """Return whether an option has a wrong type or value.

    If an option is given, its value must be a number of type ``kind``.  Every value except the option's default must
    be in the range ``allowed``.
    """
    value = getattr(o, option)
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    return value is not None and not (is_number and (float(value) in allowed or not given(option, o)))


def ranges() -> Iterator[Refusal]:
    """For each option in `WHOLE` and `SEARCH`, yield the refusal of values outside the option's range."""
    for commands, table in WHOLE.items():
        for option, allowed in table.items():
            sentence = f"{flag(option)} must be a whole number of at least {allowed.least}, got {{o.{option}!r}}"
            yield Refusal(commands, partial(outside, option, Integral, allowed), sentence)
    for option, allowed in SEARCH.items():
        sentence = f"{flag(option)} must be {allowed}, got {{o.{option}!r}}"
        yield Refusal(SEARCHES, partial(outside, option, Real, allowed), sentence)


def outside_training_range(o: GivenOptions) -> str | None:
    """Return an error message for the first number that is NaN or outside the range of its option."""
    for name, values in o.values.items():
        allowed = TRAINING.get(name, FINITE)
        for value in values if isinstance(values, list) else [values]:
            if isinstance(value, int | float) and (value not in allowed if name in TRAINING else value != value):
                return f"{flag(name)} must be {allowed}, got {value}"
    return None


def wrong_adam_betas(o: GivenOptions) -> bool:
    """Return whether ``--adam-betas`` is given and is not a pair of numbers in [0, 1)."""
    try:
        betas = literal(o.adam_betas) if isinstance(o.adam_betas, str) else o.adam_betas
        return betas is not None and not (len(betas) == 2 and all(0 <= beta < 1 for beta in betas))
    except (TypeError, ValueError):
        return True


def wrong_direction(o: GivenOptions) -> str | None:
    """Return the problem and the fix if ``--maximize-best-checkpoint-metric`` contradicts the metric, or None."""
    metric = str(o.best_checkpoint_metric)
    kind = metric.rpartition("_")[2]  # ``loss`` for the metric nll_loss
    lower = kind in LOWER_IS_BETTER or (metric in RISK_METRICS and o.criterion == "sequence_risk")
    if kind in HIGHER_IS_BETTER and not o.maximize_best_checkpoint_metric:
        return "higher values are better; add"
    if lower and o.maximize_best_checkpoint_metric:
        return "lower values are better; leave out"
    return None


REFUSALS = (
    Refusal(
        TRAIN,
        wrong_adam_betas,
        "--adam-betas must be two numbers in [0, 1), got {o.adam_betas}",
    ),
    Refusal(
        TRAIN,
        lambda o: o.lr_scheduler == "inverse_sqrt" and o.warmup_updates == 0,
        "--warmup-updates must be at least 1 with --lr-scheduler inverse_sqrt, got 0",
    ),
    Refusal(
        TRAIN,
        wrong_direction,
        "--best-checkpoint-metric {o.best_checkpoint_metric}: {found} --maximize-best-checkpoint-metric",
    ),
    Refusal(
        TRAIN,
        lambda o: o.ddp_backend in ("fully_sharded", "slowmo") and (o.cpu or not torch.cuda.is_available()),
        "--ddp-backend {o.ddp_backend} needs GPUs; use pytorch_ddp or legacy_ddp on CPUs",
    ),
    Refusal(
        COMMANDS,
        lambda o: o.tokenizer == "moses" and None in (o.source_lang, o.target_lang),
        "--tokenizer moses needs --source-lang and --target-lang, got {o.source_lang} and {o.target_lang}",
    ),
    Refusal(
        TRANSLATE,
        lambda o: None not in (o.replace_unk, o.post_process),
        "--replace-unk needs a model without subwords, got --post-process (--remove-bpe) {o.post_process}; "
        "leave one out",
    ),
    Refusal(
        GENERATE,
        lambda o: o.replace_unk is not None and o.dataset_impl != "raw",
        "--replace-unk needs --dataset-impl raw, because binary data does not contain the unknown words, got "
        "{o.dataset_impl}; give raw data, or use fairseq-interactive",
    ),
    Refusal(COMMANDS, missing_of_a_part, "{found}, which is missing; give it"),
    *ranges(),
    Refusal(
        SEARCHES,
        lambda o: o.unkpen is not None and not (isinstance(o.unkpen, int | float) and o.unkpen > -math.inf),
        "--unkpen must be a number above -inf, got {o.unkpen!r}",
    ),
    Refusal(COMMANDS, outside_training_range, "{found}"),
    *unread(),
    Refusal(
        GENERATE,
        lambda o: o.sacrebleu and o.scoring != "sacrebleu",
        "--sacrebleu does nothing in {command}; use --scoring sacrebleu",
    ),
    *(
        Refusal(
            (*TRANSLATE, *VALIDATE),
            partial(other_in_validation, option),
            f"{flag(option)}-valid does nothing in {{command}}, got {{o.{option}_valid}}; use {flag(option)}",
        )
        for option in ("max_tokens", "batch_size")
    ),
    Refusal(SEARCHES, several_searches, "{found} are different searches; use one of them"),
    Refusal(
        SEARCHES,
        lambda o: None not in (o.sampling_topk, o.words) and o.sampling_topk > o.words,
        "--sampling-topk must be at most the number of target words, {o.words}, got {o.sampling_topk}",
    ),
    Refusal(
        TRANSLATE,
        lambda o: o.lm_weight and o.lm_path is None,
        "--lm-weight does nothing without --lm-path, got {o.lm_weight}; give --lm-path",
    ),
    Refusal(
        TRANSLATE,
        lambda o: o.retain_dropout_modules and not o.retain_dropout,
        "--retain-dropout-modules does nothing without --retain-dropout, got {o.retain_dropout_modules}; give both",
    ),
    Refusal(
        GENERATE,
        lambda o: o.constraints,
        "--constraints is not read by fairseq-generate, got {o.constraints}; use fairseq-interactive, which reads them "
        "after a tab in each line, or inference_step_args={{'constraints': ...}} from Python",
    ),
    Refusal(
        INTERACTIVE,
        lambda o: o.print_alignment == "soft",
        "--print-alignment soft is not read by fairseq-interactive; use fairseq-generate, or --print-alignment hard",
    ),
    Refusal(TRANSLATE, lambda o: o.nbest > o.beam, "--nbest must be at most --beam, got {o.nbest} and {o.beam}"),
    Refusal(
        SEARCHES,
        lambda o: not o.max_len_a and None not in (o.min_len, o.max_len_b) and o.min_len > o.max_len_b,
        "--min-len must be at most --max-len-b, got {o.min_len} and {o.max_len_b}",
    ),
    Refusal(
        SEARCHES,
        partial(given, "diverse_beam_groups"),
        "--diverse-beam-groups fails in fairseq, got {o.diverse_beam_groups}; use --diversity-rate or --sampling",
    ),
    Refusal(
        SEARCHES,
        lambda o: (o.sampling_topk or 0) > 0 and (o.sampling_topp or 0) > 0,
        "--sampling-topk does nothing with --sampling-topp, got {o.sampling_topk}; leave one out",
    ),
    Refusal(
        SEARCHES,
        lambda o: o.unnormalized and given("lenpen", o),
        "--lenpen does nothing with --unnormalized, got {o.lenpen}; leave one out",
    ),
    Refusal(
        SEARCHES,
        lambda o: o.word_penalty and o.sampling and (o.sampling_topp or 0) > 0,
        "--word-penalty with --sampling-topp: probabilities would no longer sum to 1; leave one out",
    ),
)


def command_of(options: Any) -> str | None:
    """Return the name of the command that has these options, without ``fairseq-``."""
    return next((command for option, command in COMMAND_OF_OPTION.items() if option in options), None)


def refuse(command: str | None, *parts: Any) -> None:
    """Check options before a command or function starts.

    Raises:
        ValueError: an option, or a combination of options, is refused.
    """
    o = GivenOptions(*parts)
    for refusal in REFUSALS:
        if command in refusal.commands and (found := refusal.found(o)):
            place = f"fairseq-{command}" if command in COMMANDS else command
            raise ValueError(refusal.sentence.format(o=o, found=found, command=place))
