"""Options that a command cannot do, refused before it starts: one table for command lines, hydra and Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from numbers import Integral, Real
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
from fairseq_plugins.repairs.training_options import beyond_its_limits, no_decay_rates, wrong_direction

# Only the parser of this command has the option; the first one found names the command.
OPTION_OF = {"buffer_size": "interactive", "beam": "generate", "max_epoch": "train", "path": "validate"}
GENERATE, INTERACTIVE, TRAIN, VALIDATE = ("generate",), ("interactive",), ("train",), ("validate",)
TRANSLATE = (*GENERATE, *INTERACTIVE)
COMMANDS = (*TRANSLATE, *TRAIN, *VALIDATE)
SEARCHES = (*TRANSLATE, "python")  # python: the generator that `task.build_generator` makes, for any caller

OF_THE_TASK = "${task."  # how a model's options refer to its task's


class Options:
    """Options by name, of a command line, a task, or all sections of a configuration; a missing one is None."""

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
    """One line of the table.

    Attributes:
        commands: where it holds.
        found: what is wrong with the options, or something false.
        sentence: a format of the options ``o`` and of ``found``: ``--option: problem, got value; fix``.
    """

    commands: tuple[str, ...]
    found: Callable[[Options], Any]
    sentence: str


def missing_in_the_task(o: Any) -> Iterator[str]:
    """Yield the options of the task that the model of a command line takes, and the task does not have."""
    model = MODEL_DATACLASS_REGISTRY.get(ARCH_MODEL_NAME_REGISTRY.get(o.arch))
    task = TASK_DATACLASS_REGISTRY.get(o.task)
    for name, field in getattr(model, "__dataclass_fields__", {}).items():
        value = str(getattr(o, name) or field.default)
        option = value.removeprefix(OF_THE_TASK).removesuffix("}")
        if value.startswith(OF_THE_TASK) and option not in getattr(task, "__dataclass_fields__", {}):
            yield option


def is_task(o: Options, kind: type) -> bool:
    """Whether the task, given by its name or class, is one of a kind."""
    task = TASK_REGISTRY.get(o.task, o.task)
    return isinstance(task, type) and issubclass(task, kind)


def refines(o: Options) -> bool:
    """Whether the task's generator refines a translation step by step."""
    return is_task(o, TranslationLevenshteinTask)


def whole(least: int) -> tuple[Callable[[Any], bool], str]:
    """Whole numbers from ``least`` on."""
    return lambda n: isinstance(n, Integral) and int(n) >= least, f"must be a whole number and at least {least}"


# The numbers that an option takes, and their description.
NUMBERS = {
    "beam": whole(1),
    "nbest": whole(1),
    "min_len": whole(0),
    "max_len_a": (lambda x: 0 <= x < math.inf, "must be finite and at least 0"),
    "max_len_b": whole(0),
    "lenpen": (math.isfinite, "must be finite"),
    "unkpen": (lambda x: x > -math.inf, "must be a number above -inf"),
    "word_penalty": (math.isfinite, "must be finite"),
    "lm_weight": (math.isfinite, "must be finite"),
    "temperature": (lambda x: 0 < x < math.inf, "must be finite and above 0"),
    "sampling_topk": whole(-1),
    "sampling_topp": (lambda x: x == -1 or 0 <= x <= 1, "must be in [0, 1]"),
    "diverse_beam_groups": whole(-1),
    "diverse_beam_strength": (math.isfinite, "must be finite"),
    "diversity_rate": (lambda x: x == -1 or 0 <= x < math.inf, "must be finite and at least 0"),
    "prefix_size": whole(0),
    "no_repeat_ngram_size": whole(0),
}


def wrong_number(option: str, holds: Callable[[Any], bool], o: Options) -> bool:
    """Whether an option has been given something else than the numbers that it takes."""
    value = getattr(o, option)
    return value is not None and (isinstance(value, bool) or not isinstance(value, Real) or not holds(value))


OF_REFINING = "it is for models that refine a translation step by step (--task translation_lev)"
OF_SPEECH = "it is for models of speech"

# Options that fairseq's parser has for all tasks and commands, and nothing reads; each with a remedy.
UNREAD_BY_SEARCHES = {
    "no_early_stop": "leave it out",
    "eos_token": OF_SPEECH,
    **dict.fromkeys(("beam_mt", "max_len_a_mt", "max_len_b_mt", "lenpen_mt"), OF_SPEECH),
    "decoding_format": OF_REFINING,
    "iter_decode_eos_penalty": OF_REFINING,
    "iter_decode_max_iter": OF_REFINING,
    "iter_decode_force_max_iter": OF_REFINING,
    "iter_decode_with_beam": OF_REFINING,
    "iter_decode_with_external_reranker": OF_REFINING,
}
GENERATE_DOES = "use fairseq-generate"
UNREAD_BY_INTERACTIVE = {
    "lm_path": GENERATE_DOES,
    "prefix_size": GENERATE_DOES,
    "score_reference": GENERATE_DOES,
    "sacrebleu": GENERATE_DOES + " --scoring sacrebleu",
    "scoring": GENERATE_DOES,
    "results_path": "redirect the standard output into a file",
    "quiet": GENERATE_DOES,
    "gen_subset": GENERATE_DOES,
}
NO_HALF_BUT_FP16 = "use --fp16 on a GPU, and --task translation_fast --cpu-dtype bfloat16 on a CPU"
UNREAD_BY_TRANSLATING = {
    "num_shards": "fairseq-generate translates one part of N with --distributed-world-size N --distributed-rank I",
    "shard_id": "fairseq-generate translates one part of N with --distributed-world-size N --distributed-rank I",
    "bf16": NO_HALF_BUT_FP16,
    "memory_efficient_bf16": NO_HALF_BUT_FP16,
    "amp": NO_HALF_BUT_FP16,
    "train_subset": "fairseq-generate --gen-subset chooses a part of the data",
    "valid_subset": "fairseq-generate --gen-subset chooses a part of the data",
    "max_valid_steps": "leave it out",
    "restore_file": "--path names the checkpoint",
    "finetune_from_model": "--path names the checkpoint",
    "save_dir": "--path names the checkpoint",
    "log_file": "redirect the standard output into a file",
}
UNREAD_BY_VALIDATING = {
    "num_shards": "use --distributed-world-size",
    "shard_id": "use --distributed-world-size",
    "bf16": "use --fp16 on a GPU",
    "memory_efficient_bf16": "use --fp16 on a GPU",
    "amp": "use --fp16 on a GPU",
    "train_subset": "--valid-subset chooses a part of the data",
    "gen_subset": "--valid-subset chooses a part of the data",
    "max_valid_steps": "leave it out",
    "scoring": "the criterion of the training validates",
    "quiet": "leave it out",
    "results_path": "redirect the standard output into a file",
    "log_file": "redirect the standard output into a file",
}
UNREAD_BY_TRAINING = {
    "num_shards": "use --distributed-world-size",
    "shard_id": "use --distributed-world-size",
    "gen_subset": "--valid-subset chooses what training validates with",
    "scoring": "--eval-bleu validates with BLEU",
}

DEFAULTS = {option: registry["default"] for option, registry in REGISTRIES.items()} | {
    option: field.default
    for section in FairseqConfig.__dataclass_fields__.values()
    for option, field in getattr(section.type, "__dataclass_fields__", {}).items()
}


def given(option: str, o: Options) -> bool:
    """Whether an option differs from its default."""
    return getattr(o, option) not in (None, DEFAULTS[option])


def unread(commands: tuple[str, ...], remedies: dict[str, str]) -> Iterator[Refusal]:
    """Refuse options that these commands do not read, where they differ from their default."""
    for option, remedy in remedies.items():
        sentence = f"{flag(option)} does nothing here, got {{o.{option}!r}}; {remedy}"
        yield Refusal(commands, partial(given, option), sentence)


def unread_by_searches() -> Iterator[Refusal]:
    """Refuse options of other tasks' generators for the tasks that translate word by word."""
    for refusal in unread(SEARCHES, UNREAD_BY_SEARCHES):

        def found(o: Options, refusal: Refusal = refusal) -> bool:
            return is_task(o, TranslationTask) and not refines(o) and refusal.found(o)

        yield refusal._replace(found=found)


def other_in_validation(option: str, o: Options) -> bool:
    """Whether validation is to have another value; a command line fills in the same one."""
    return getattr(o, f"{option}_valid") not in (None, getattr(o, option))


def missing_of_a_part(o: Options) -> str | None:
    """Name a part and its first option that has no default and is missing, as ``--bpe-codes`` of subword_nmt."""
    for kind, registry in REGISTRIES.items():
        fields = getattr(registry["dataclass_registry"].get(getattr(o, kind)), "__dataclass_fields__", {})
        for option, field in fields.items():
            if field.default == MISSING and getattr(o, option) in (None, MISSING):
                return f"{flag(kind)} {getattr(o, kind)} needs {flag(option)}"
    return None


def several_searches(o: Options) -> str | None:
    """Name the searches that options ask for, if they are more than one."""
    asked = {
        "--sampling": o.sampling,
        "--constraints": o.constraints,
        "--match-source-len": o.match_source_len,
        "--diverse-beam-groups": (o.diverse_beam_groups or 0) > 0,
        "--diversity-rate": o.diversity_rate is not None and o.diversity_rate >= 0,
    }
    found = [option for option, value in asked.items() if value]
    return " and ".join(found) if len(found) > 1 else None


REFUSALS = (
    Refusal(
        TRAIN,
        no_decay_rates,
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
        "--tpu needs torch_xla, which is not installed",
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
    Refusal(COMMANDS, missing_of_a_part, "{found}, which is missing"),
    *(
        Refusal(SEARCHES, partial(wrong_number, option, holds), f"{flag(option)} {numbers}, got {{o.{option}!r}}")
        for option, (holds, numbers) in NUMBERS.items()
    ),
    *(
        Refusal(
            COMMANDS, partial(wrong_number, option, whole(1)[0]), f"{flag(option)} {whole(1)[1]}, got {{o.{option}!r}}"
        )
        for option in ("max_tokens", "batch_size")
    ),
    Refusal(COMMANDS, lambda o: next(beyond_its_limits(o), None), "{found}"),
    Refusal(
        TRAIN,
        lambda o: o.upsample_primary is not None and o.upsample_primary != -1 and o.upsample_primary < 1,
        "--upsample-primary must be at least 1, got {o.upsample_primary}",
    ),
    *unread(INTERACTIVE, UNREAD_BY_INTERACTIVE),
    *unread(TRANSLATE, UNREAD_BY_TRANSLATING),
    *unread(VALIDATE, UNREAD_BY_VALIDATING),
    *unread(TRAIN, UNREAD_BY_TRAINING),
    *unread_by_searches(),
    Refusal(
        GENERATE,
        lambda o: o.sacrebleu and o.scoring != "sacrebleu",
        "--sacrebleu does nothing here; use --scoring sacrebleu",
    ),
    *(
        Refusal(
            (*TRANSLATE, *VALIDATE),
            partial(other_in_validation, option),
            f"{flag(option)}-valid does nothing here, got {{o.{option}_valid}}; use {flag(option)}",
        )
        for option in ("max_tokens", "batch_size")
    ),
    Refusal(TRANSLATE, lambda o: o.nbest > o.beam, "--nbest must be at most --beam, got {o.nbest} and {o.beam}"),
    Refusal(
        SEARCHES,
        lambda o: not o.max_len_a and None not in (o.min_len, o.max_len_b) and o.min_len > o.max_len_b,
        "--min-len must be at most --max-len-b, got {o.min_len} and {o.max_len_b}",
    ),
    Refusal(SEARCHES, several_searches, "{found} are searches of their own; use one of them"),
    Refusal(
        SEARCHES,
        lambda o: (o.diverse_beam_groups or 0) > 0 and (o.beam or 5) % o.diverse_beam_groups,
        "--diverse-beam-groups must divide --beam, got {o.diverse_beam_groups} and {o.beam}",
    ),
    Refusal(
        SEARCHES,
        lambda o: given("diverse_beam_strength", o) and (o.diverse_beam_groups or 0) <= 0,
        "--diverse-beam-strength does nothing without --diverse-beam-groups, got {o.diverse_beam_strength}",
    ),
    Refusal(
        SEARCHES,
        lambda o: (o.sampling_topk or 0) > 0 and (o.sampling_topp or 0) > 0,
        "--sampling-topk does nothing beside --sampling-topp, got {o.sampling_topk}; leave one out",
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
        "--lm-weight does nothing without --lm-path, got {o.lm_weight}",
    ),
    Refusal(
        TRANSLATE,
        lambda o: o.retain_dropout_modules and not o.retain_dropout,
        "--retain-dropout-modules does nothing without --retain-dropout, got {o.retain_dropout_modules}",
    ),
    Refusal(
        SEARCHES,
        lambda o: o.print_step and not refines(o),
        "--print-step needs a model that refines a translation step by step (--task translation_lev)",
    ),
    Refusal(
        SEARCHES,
        lambda o: o.retain_iter_history and not refines(o),
        "--retain-iter-history needs a model that refines a translation step by step (--task translation_lev)",
    ),
    Refusal(
        SEARCHES,
        lambda o: o.word_penalty and o.sampling and (o.sampling_topp or 0) > 0,
        "--word-penalty with --sampling-topp: probabilities would no longer sum to 1; leave one out",
    ),
)


def command_of(options: Any) -> str | None:
    """Return the name of the command to which these options belong, without ``fairseq-``."""
    return next((command for option, command in OPTION_OF.items() if option in options), None)


def refuse(command: str | None, *parts: Any) -> None:
    """Check options before the command starts.

    Raises:
        ValueError: the command cannot do what they ask.
    """
    o = Options(*parts)
    for refusal in REFUSALS:
        if command in refusal.commands and (found := refusal.found(o)):
            raise ValueError(refusal.sentence.format(o=o, found=found))
