"""The table of refused options, checked on command lines, in hydra configurations and in calls from Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from fairseq import utils
from fairseq.dataclass.configs import FairseqConfig
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_DATACLASS_REGISTRY
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY
from fairseq.tasks.translation import TranslationTask
from fairseq.tasks.translation_lev import TranslationLevenshteinTask
from omegaconf import MISSING, DictConfig, OmegaConf

from fairseq_plugins.common.options import flag
from fairseq_plugins.repairs.ranges import (
    SEARCH,
    outside_search_range,
    outside_training_range,
    whole,
    wrong_adam_betas,
    wrong_direction,
)

# A parser belongs to the command of the first option here that it has.
COMMAND_OF_OPTION = {"buffer_size": "interactive", "beam": "generate", "max_epoch": "train", "path": "validate"}
GENERATE, INTERACTIVE, TRAIN, VALIDATE = ("generate",), ("interactive",), ("train",), ("validate",)
TRANSLATE = (*GENERATE, *INTERACTIVE)
COMMANDS = (*TRANSLATE, *TRAIN, *VALIDATE)
SEARCHES = (*TRANSLATE, "python")  # "python" means any call of `task.build_generator`

OF_THE_TASK = "${task."  # a model's option whose default refers to an option of the task


class GivenOptions:
    """Options by name, from a command line, a task, or all sections of a configuration; a missing option is None."""

    def __init__(self, *parts: Any) -> None:
        self.values: dict[str, Any] = {}
        for part in parts:
            for name, value in values_of(part).items():
                section = {each: of for each, of in values_of(value).items() if not str(of).startswith("${")}
                if "_name" in section:
                    self.values |= section
                self.values[name] = section.get("_name", value)
        self.values.setdefault("arch", self.values.get("model"))

    def __getattr__(self, name: str) -> Any:
        return self.values.get(name)


def values_of(part: Any) -> dict[str, Any]:
    """Return the options in a configuration, a dataclass or a namespace."""
    if isinstance(part, DictConfig):
        part = OmegaConf.to_container(part, resolve=False, enum_to_str=True)
    return dict(part) if isinstance(part, Mapping) else dict(getattr(part, "__dict__", {}))


class Refusal(NamedTuple):
    """One row of the table.

    Attributes:
        commands: commands to which the row applies.
        found: a function that returns the fault in the options, or a false value if there is none.
        sentence: the error message, a format string for the options ``o``, the fault ``found`` and the name of the
            ``command``, in the form ``--option: problem, got value; fix``.
    """

    commands: tuple[str, ...]
    found: Callable[[GivenOptions], Any]
    sentence: str


def missing_in_the_task(o: Any) -> Iterator[str]:
    """Yield options that the model reads from the task, and that the task does not have."""
    model = MODEL_DATACLASS_REGISTRY.get(ARCH_MODEL_NAME_REGISTRY.get(o.arch))
    task = TASK_DATACLASS_REGISTRY.get(o.task)
    for name, field in getattr(model, "__dataclass_fields__", {}).items():
        value = str(getattr(o, name) or field.default)
        option = value.removeprefix(OF_THE_TASK).removesuffix("}")
        if value.startswith(OF_THE_TASK) and option not in getattr(task, "__dataclass_fields__", {}):
            yield option


def is_task(o: GivenOptions, kind: type) -> bool:
    """Return whether the task, given by its name or class, is a subclass of ``kind``."""
    task = TASK_REGISTRY.get(o.task, o.task)
    return isinstance(task, type) and issubclass(task, kind)


def refines(o: GivenOptions) -> bool:
    """Return whether the task's generator refines a translation step by step."""
    return is_task(o, TranslationLevenshteinTask)


REFINING = "leave it out, or use a model that refines a translation step by step (--task translation_lev)"
SPEECH = "leave it out: it is for speech models only"
# Options that only the generators of other tasks read; tasks that translate word by word ignore them.
UNREAD_BY_SEARCHES = {
    "no_early_stop": "leave it out",
    **dict.fromkeys(("eos_token", "beam_mt", "max_len_a_mt", "max_len_b_mt", "lenpen_mt"), SPEECH),
    **dict.fromkeys(("decoding_format", "iter_decode_eos_penalty", "iter_decode_max_iter"), REFINING),
    **dict.fromkeys(("iter_decode_force_max_iter", "iter_decode_with_beam"), REFINING),
    "iter_decode_with_external_reranker": REFINING,
}
LOG = {"log_file": "redirect the standard output into a file"}
RESULTS = {"results_path": "redirect the standard output into a file"}
STEPS = {"max_valid_steps": "leave it out"}
HALF = ("bf16", "memory_efficient_bf16", "amp")
SHARDS = ("num_shards", "shard_id")
WORLD_SIZE = dict.fromkeys(SHARDS, "use --distributed-world-size")
# Options that a command's parser accepts but the command ignores, each with a replacement.
UNREAD: dict[tuple[str, ...], dict[str, str]] = {
    INTERACTIVE: {
        **dict.fromkeys(("lm_path", "prefix_size", "score_reference", "scoring"), "use fairseq-generate"),
        **dict.fromkeys(("quiet", "gen_subset"), "use fairseq-generate"),
        "sacrebleu": "use fairseq-generate --scoring sacrebleu",
        **RESULTS,
    },
    TRANSLATE: {
        **dict.fromkeys(SHARDS, "use fairseq-generate --distributed-world-size N --distributed-rank I for part I of N"),
        **dict.fromkeys(HALF, "use --fp16 on a GPU, and --task translation_fast --cpu-dtype bfloat16 on a CPU"),
        **dict.fromkeys(("train_subset", "valid_subset"), "use fairseq-generate --gen-subset"),
        **dict.fromkeys(("restore_file", "finetune_from_model", "save_dir"), "use --path for the checkpoint"),
        **LOG,
        **STEPS,
    },
    VALIDATE: {
        **WORLD_SIZE,
        **dict.fromkeys(HALF, "use --fp16 on a GPU"),
        **dict.fromkeys(("train_subset", "gen_subset"), "use --valid-subset"),
        "scoring": "leave it out: validation uses the training's criterion",
        "quiet": "leave it out",
        **RESULTS,
        **LOG,
        **STEPS,
    },
    TRAIN: {**WORLD_SIZE, "gen_subset": "use --valid-subset", "scoring": "use --eval-bleu to validate with BLEU"},
}

DEFAULTS = {option: registry["default"] for option, registry in REGISTRIES.items()} | {
    option: field.default
    for section in FairseqConfig.__dataclass_fields__.values()
    for option, field in getattr(section.type, "__dataclass_fields__", {}).items()
}


def given(option: str, o: GivenOptions) -> bool:
    """Return whether an option differs from its default."""
    return getattr(o, option) not in (None, DEFAULTS[option])


def given_to_a_search(option: str, o: GivenOptions) -> bool:
    """Return whether an option differs from its default and the task translates word by word."""
    return is_task(o, TranslationTask) and not refines(o) and given(option, o)


def unread(
    commands: tuple[str, ...], instead: dict[str, str], found: Callable[[str, GivenOptions], bool] = given
) -> Iterator[Refusal]:
    """Yield a row for each option that these commands ignore."""
    for option, fix in instead.items():
        sentence = f"{flag(option)} does nothing in {{command}}, got {{o.{option}!r}}; {fix}"
        yield Refusal(commands, partial(found, option), sentence)


def other_in_validation(option: str, o: GivenOptions) -> bool:
    """Return whether ``option`` has another value for validation; a command line copies its value for validation."""
    return getattr(o, f"{option}_valid") not in (None, getattr(o, option))


def missing_of_a_part(o: GivenOptions) -> str | None:
    """Name a component and the first option it requires that was not given, such as ``--bpe-codes`` of subword_nmt."""
    for kind, registry in REGISTRIES.items():
        fields = getattr(registry["dataclass_registry"].get(getattr(o, kind)), "__dataclass_fields__", {})
        for option, field in fields.items():
            if field.default == MISSING and getattr(o, option) in (None, MISSING):
                return f"{flag(kind)} {getattr(o, kind)} needs {flag(option)}"
    return None


def several_searches(o: GivenOptions) -> str | None:
    """Name the searches that the options choose, if they choose more than one."""
    chosen = {
        "--sampling": o.sampling,
        "--constraints": o.constraints,
        "--match-source-len": o.match_source_len,
        "--diversity-rate": o.diversity_rate is not None and o.diversity_rate >= 0,
    }
    found = [option for option, value in chosen.items() if value]
    return " and ".join(found) if len(found) > 1 else None


def ranges() -> Iterator[Refusal]:
    """Yield rows that refuse search options outside their ranges, and batch sizes below 1."""
    sizes = dict.fromkeys(("max_tokens", "batch_size"), whole(1))
    for commands, table in ((SEARCHES, SEARCH), (COMMANDS, sizes)):
        for option, (holds, numbers) in table.items():
            sentence = f"{flag(option)} {numbers}, got {{o.{option}!r}}"
            yield Refusal(commands, partial(outside_search_range, option, holds), sentence)


def without_refining(option: str) -> Refusal:
    """Return a row that refuses an option for generators that refine translations, if the task does not refine."""
    return Refusal(SEARCHES, lambda o: getattr(o, option) and not refines(o), f"{flag(option)} is not read; {REFINING}")


REFUSALS = (
    Refusal(
        TRAIN,
        wrong_adam_betas,
        "--adam-betas must be two numbers of at least 0 and less than 1, got {o.adam_betas}",
    ),
    Refusal(
        TRAIN,
        lambda o: o.lr_scheduler == "inverse_sqrt" and o.warmup_updates == 0,
        "--warmup-updates must be at least 1 with --lr-scheduler inverse_sqrt, got 0",
    ),
    Refusal(
        TRAIN,
        wrong_direction,
        "--best-checkpoint-metric {o.best_checkpoint_metric} {found} --maximize-best-checkpoint-metric",
    ),
    Refusal(
        TRAIN,
        lambda o: next(missing_in_the_task(o), None),
        "--task {o.task} has no {found}, which --arch {o.arch} needs; use --task translation or translation_fast",
    ),
    Refusal(
        COMMANDS,
        lambda o: o.tpu and getattr(utils, "xm", None) is None,
        "--tpu needs torch_xla, which is not installed; install it, or leave --tpu out",
    ),
    Refusal(
        COMMANDS,
        lambda o: o.tokenizer == "moses" and None in (o.source_lang, o.target_lang),
        "--tokenizer moses needs --source-lang and --target-lang, got {o.source_lang} and {o.target_lang}",
    ),
    Refusal(
        TRANSLATE,
        lambda o: None not in (o.replace_unk, o.post_process),
        "--replace-unk needs a model of words, got --remove-bpe (--post-process) {o.post_process}; leave one out",
    ),
    Refusal(COMMANDS, missing_of_a_part, "{found}, which is missing; give it"),
    *ranges(),
    Refusal(COMMANDS, lambda o: next(outside_training_range(o), None), "{found}"),
    Refusal(
        TRAIN,
        lambda o: o.upsample_primary is not None and o.upsample_primary != -1 and o.upsample_primary < 1,
        "--upsample-primary must be at least 1, got {o.upsample_primary}",
    ),
    *(refusal for commands, instead in UNREAD.items() for refusal in unread(commands, instead)),
    *unread(SEARCHES, UNREAD_BY_SEARCHES, given_to_a_search),
    Refusal(
        GENERATE,
        lambda o: o.sacrebleu and o.scoring != "sacrebleu",
        "--sacrebleu does nothing in {command}; use --scoring sacrebleu",
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
    *(
        Refusal(
            (*TRANSLATE, *VALIDATE),
            partial(other_in_validation, option),
            f"{flag(option)}-valid does nothing in {{command}}, got {{o.{option}_valid}}; use {flag(option)}",
        )
        for option in ("max_tokens", "batch_size")
    ),
    Refusal(TRANSLATE, lambda o: o.nbest > o.beam, "--nbest must be at most --beam, got {o.nbest} and {o.beam}"),
    Refusal(
        SEARCHES,
        lambda o: not o.max_len_a and None not in (o.min_len, o.max_len_b) and o.min_len > o.max_len_b,
        "--min-len must be at most --max-len-b, got {o.min_len} and {o.max_len_b}",
    ),
    Refusal(SEARCHES, several_searches, "{found} are different searches; use one of them"),
    Refusal(
        SEARCHES,
        partial(given, "diverse_beam_groups"),
        "--diverse-beam-groups fails in fairseq, got {o.diverse_beam_groups}; use --diversity-rate or --sampling",
    ),
    Refusal(
        SEARCHES,
        partial(given, "diverse_beam_strength"),
        "--diverse-beam-strength needs --diverse-beam-groups, which fails in fairseq, got {o.diverse_beam_strength}; "
        "use --diversity-rate",
    ),
    Refusal(
        SEARCHES,
        lambda o: (o.sampling_topk or 0) > 0 and (o.sampling_topp or 0) > 0,
        "--sampling-topk does nothing with --sampling-topp, got {o.sampling_topk}; leave one out",
    ),
    Refusal(
        SEARCHES,
        lambda o: None not in (o.sampling_topk, o.words) and o.sampling_topk > o.words,
        "--sampling-topk must be at most the number of target words, {o.words}, got {o.sampling_topk}",
    ),
    Refusal(
        SEARCHES,
        lambda o: o.unnormalized and given("lenpen", o),
        "--lenpen does nothing with --unnormalized, got {o.lenpen}; leave one out",
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
    without_refining("print_step"),
    without_refining("retain_iter_history"),
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
    """Check options before the command starts.

    Raises:
        ValueError: the command cannot do what the options ask for.
    """
    o = GivenOptions(*parts)
    for refusal in REFUSALS:
        if command in refusal.commands and (found := refusal.found(o)):
            place = "task.build_generator" if command == "python" else f"fairseq-{command}"
            raise ValueError(refusal.sentence.format(o=o, found=found, command=place))
