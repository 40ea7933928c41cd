"""Options that a command cannot do, refused before it starts: one table for command lines, hydra and Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from fairseq import utils
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY, FairseqMultiModel
from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY
from fairseq.tasks.translation_lev import TranslationLevenshteinTask
from omegaconf import DictConfig, OmegaConf

from fairseq_plugins.compat.training_options import beyond_its_limits, no_decay_rates, wrong_direction

__all__ = ["Options", "command_of", "missing_in_the_task", "refuse"]

# Only the parser of this command has the option; the first one found names the command.
OPTION_OF = {"buffer_size": "interactive", "beam": "generate", "max_epoch": "train", "path": "validate"}
GENERATE, INTERACTIVE, TRAIN = ("generate",), ("interactive",), ("train",)
COMMAND_LINES = (*GENERATE, *INTERACTIVE)
SEARCHES = (*COMMAND_LINES, "python")  # python: the generator that `task.build_generator` makes, for any caller

OF_THE_TASK = "${task."  # how a model's options refer to its task's


class Options:
    """Options by name, of a command line, a task, or all sections of a configuration; a missing one is None."""

    def __init__(self, *parts: Any) -> None:
        self._values: dict[str, Any] = {}
        for part in parts:
            for name, value in values_of(part).items():
                section = values_of(value)
                if "_name" in section:
                    self._values |= section
                self._values[name] = section.get("_name", value)
        self._values.setdefault("arch", self._values.get("model"))

    def __getattr__(self, name: str) -> Any:
        return self._values.get(name)


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


def refines(o: Options) -> bool:
    """Whether the task's generator refines a translation step by step."""
    return issubclass(TASK_REGISTRY.get(o.task, object), TranslationLevenshteinTask)


def below_one(o: Options) -> bool:
    return o.beam is not None and (not isinstance(o.beam, int) or o.beam < 1)


REFUSALS = (
    Refusal(
        (*TRAIN, *COMMAND_LINES, "validate"),
        lambda o: next(beyond_its_limits(o), None),
        "{found}",
    ),
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
        TRAIN,
        lambda o: (
            o.task == "multilingual_translation"
            and not issubclass(ARCH_MODEL_REGISTRY.get(o.arch, FairseqMultiModel), FairseqMultiModel)
        ),
        "--task multilingual_translation needs --arch multilingual_transformer or one like it, got {o.arch}; "
        "--task translation_multi_simple_epoch trains one model for all pairs of languages",
    ),
    Refusal(
        TRAIN,
        lambda o: o.criterion == "adaptive_loss" and not o.adaptive_softmax_cutoff,
        "--criterion adaptive_loss needs a model with an adaptive softmax, and this {o.arch} has a full one; use "
        "label_smoothed_cross_entropy or cross_entropy",
    ),
    Refusal(
        (*TRAIN, *COMMAND_LINES, "validate"),
        lambda o: o.tpu and getattr(utils, "xm", None) is None,
        "--tpu needs torch_xla, which is not installed",
    ),
    Refusal(
        (*TRAIN, *COMMAND_LINES, "validate"),
        lambda o: o.tokenizer == "moses" and None in (o.source_lang, o.target_lang),
        "--tokenizer moses needs --source-lang and --target-lang, got {o.source_lang} and {o.target_lang}",
    ),
    Refusal(
        COMMAND_LINES,
        lambda o: (o.num_shards or 1) > 1,
        "--num-shards does nothing here, got {o.num_shards}; fairseq-generate translates one part of N with "
        "--distributed-world-size N --distributed-rank I",
    ),
    Refusal(
        COMMAND_LINES,
        lambda o: None not in (o.replace_unk, o.post_process),
        "--replace-unk needs a model of words, got --remove-bpe (--post-process) {o.post_process}; leave one out",
    ),
    Refusal(
        INTERACTIVE,
        lambda o: o.score_reference,
        "--score-reference: fairseq-interactive has no references; use fairseq-generate",
    ),
    Refusal(
        INTERACTIVE,
        lambda o: o.prefix_size,
        "--prefix-size: fairseq-interactive has no references, got {o.prefix_size}; use fairseq-generate",
    ),
    Refusal(SEARCHES, below_one, "--beam must be a whole number and at least 1, got {o.beam!r}"),
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
