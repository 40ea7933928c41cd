"""Repairs of fairseq's Python interface: ``from_pretrained``, and the hub that it returns."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import torch
from fairseq import checkpoint_utils, hub_utils, utils
from fairseq.dataclass.configs import GenerationConfig
from fairseq.hub_utils import GeneratorHubInterface
from fairseq.models import FairseqEncoderDecoderModel
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY
from fairseq.tasks.fairseq_task import StatefulContainer
from fairseq.tasks.translation import TranslationTask
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import Tensor, nn

from fairseq_plugins.repairs.wrapping import mentions, raises, wrap

logger = logging.getLogger(__name__)

# Options that do nothing, each with what to use instead.
WHOLE_BEAM = {"nbest": "leave it out: generate returns the whole beam, the best translation first"}
UNREAD_BY_LOADING = WHOLE_BEAM | {
    "beam": "give it to translate or generate",
    "fp16": "call half() on the result of from_pretrained",
    "model_overrides": "give the options themselves to from_pretrained",
}
UNREAD_BY_GENERATE = WHOLE_BEAM | {
    "replace_unk": "use fairseq-interactive --replace-unk",
    "retain_dropout": "give it to from_pretrained",
    **dict.fromkeys(("lm_path", "lm_weight"), "use fairseq-generate --lm-path"),
    "sacrebleu": "use fairseq-generate --scoring sacrebleu",
    "prefix_size": 'give inference_step_args={"prefix_tokens": ...}',
}

# Sections of a configuration that translation from Python reads.
READ = {"task", "model", "generation", "dataset", "tokenizer", "bpe"}


def options_of(task: str | None) -> set[str]:
    """Return the names of a task's options, or nothing if the task uses argparse."""
    return set(getattr(TASK_DATACLASS_REGISTRY.get(task), "__dataclass_fields__", ()))


def tasks_with(option: str) -> str:
    """Return the names of all tasks with an option."""
    return ", ".join(name for name in TASK_DATACLASS_REGISTRY if option in options_of(name))


def ignores_the_task(overwrite: Callable[..., None]) -> bool:
    """Probe: whether ``overwrite`` ignores the name of another task."""
    cfg = OmegaConf.create({"task": {"_name": "translation"}})
    overwrite(cfg, {"task": "language_modeling"})
    return bool(cfg.task._name == "translation")


def use_given_task() -> None:
    """Use the ``task`` and ``bpe`` given to ``from_pretrained``, and ``fairseq-validate --criterion``.

    fairseq silently uses the checkpoint's values instead, and ignores options that the checkpoint's task lacks.
    """
    overwrite = checkpoint_utils.overwrite_args_by_name
    if not ignores_the_task(overwrite):
        return

    @wrap(checkpoint_utils, "overwrite_args_by_name")
    def overwrite_args_by_name(cfg: DictConfig, overrides: dict[str, Any]) -> None:
        task, asked = cfg.get("task"), overrides.get("task")
        if isinstance(task, DictConfig) and not isinstance(asked, dict):  # fairseq itself reads a dict
            with open_dict(task):
                if asked in TASK_DATACLASS_REGISTRY:
                    task._name = asked
                for option in options_of(task.get("_name")) & overrides.keys():  # other options have defaults
                    task[option] = overrides[option]
        for kind in REGISTRIES.keys() & cfg.keys():
            part, asked = cfg[kind], overrides.get(kind)
            if isinstance(part, DictConfig) and isinstance(asked, str) and part.get("_name") != asked:
                with open_dict(cfg):
                    cfg[kind] = None  # fairseq fills an empty section
        overwrite(cfg, overrides)


def refuse_unread(given: dict[str, Any], instead: dict[str, str], function: str) -> None:
    """Refuse options that do nothing, unless they have their defaults."""
    for option, fix in instead.items():
        if given.get(option) not in (None, False, 0, getattr(GenerationConfig, option, None)):
            raise ValueError(f"{option} does nothing in {function}, got {given[option]!r}; {fix}")


def refuse_unread_options() -> None:
    """Refuse options of ``from_pretrained`` that do nothing, and unregistered names; warn about unknown options.

    fairseq ignores an option of another task, such as ``cpu_dtype`` of translation_fast.  No probe is needed: the
    configuration shows which options were used.
    """
    load = hub_utils.from_pretrained
    read_by_the_hub = {*inspect.signature(load).parameters, "user_dir"}
    if mentions(load, "generation_args"):  # fairseq 0.12.2 does not read it
        read_by_the_hub.add("generation_args")

    @wrap(hub_utils, "from_pretrained")
    def from_pretrained(*args: Any, **kwargs: Any) -> dict[str, Any]:
        if "user_dir" in kwargs:  # it may register names
            utils.import_user_module(Namespace(user_dir=kwargs["user_dir"]))
        names = {option: registry["registry"] for option, registry in REGISTRIES.items()} | {"task": TASK_REGISTRY}
        for option in kwargs.keys() & names.keys():
            if isinstance(name := kwargs[option], str) and name not in names[option]:
                raise ValueError(f"{option}={name!r} is not registered; use one of {', '.join(sorted(names[option]))}")
        loaded = load(*args, **kwargs)
        cfg, asked = loaded["args"], kwargs.get("task")
        task = getattr(cfg.get("task"), "_name", None)
        if isinstance(asked, str) and task not in (None, asked):
            raise ValueError(f"task={asked!r} cannot take a checkpoint of the task {task}; leave task= out")
        # Models of speech have their own interface.
        if not issubclass(TASK_REGISTRY.get(task, object), TranslationTask):
            return loaded
        refuse_unread({**kwargs, **(kwargs.get("generation_args") or {})}, UNREAD_BY_LOADING, "from_pretrained")
        parts = {part: cfg[part] for part in cfg if isinstance(cfg[part], DictConfig | dict | Namespace)}
        for option in kwargs.keys() - options_of(task) - read_by_the_hub - READ:
            places = {part for part, options in parts.items() if option in options}
            if not places and tasks_with(option):
                raise ValueError(f"{option} is not an option of task={task!r}; give task=, one of {tasks_with(option)}")
            if not places & READ:
                logger.warning(f"{option} does nothing: it is not an option of translation")
        return loaded


@contextlib.contextmanager
def reporting_attention(models: nn.Module) -> Iterator[None]:
    """Make models report attention in this context, even if they were prepared for inference without it."""
    silent = [module for module in models.modules() if not getattr(module, "need_attn", True)]
    for module in silent:
        module.need_attn = True  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in silent:
            module.need_attn = False  # type: ignore[assignment]


def generate_with_skipped(generate: Callable[..., Any], arguments: dict[str, Any]) -> list[list[dict[str, Tensor]]]:
    """Translate with ``skip_invalid_size_inputs``, and return an empty translation for a skipped sentence.

    fairseq returns nothing for a skipped sentence, so all later translations belong to the wrong sentences.
    """
    hub, sentences = arguments.pop("self"), arguments.pop("tokenized_sentences")
    batches = hub._build_batches(sentences, arguments.pop("skip_invalid_size_inputs"))
    kept = sorted(number for batch in batches for number in batch["id"].tolist())
    options = arguments | arguments.pop("kwargs", {})
    found = dict(zip(kept, generate(hub, [sentences[number] for number in kept], **options), strict=True))
    nothing = {"tokens": torch.tensor([hub.tgt_dict.eos()]), "score": torch.tensor(-torch.inf)}
    nothing |= dict.fromkeys(("attention", "alignment", "positional_scores"), torch.empty(0))
    return [found.get(number, [nothing]) for number in range(len(sentences))]


def generate_as_asked() -> None:
    """Repair the hub's ``generate``: alignments, options of the task, prefixes and skipped sentences.

    In fairseq

    - ``print_alignment`` crashes, because models are prepared without attention.
    - ``score`` crashes for translations, because it has no argument for the source.
    - options of the task and ``replace_unk`` are ignored; for a single sentence, all options except the beam are
      ignored.
    - sentences are sorted, but not their prefixes.
    - each call logs four lines about batches.
    """
    generate = GeneratorHubInterface.generate
    if mentions(generate, "need_attn"):  # the probe: whether `generate` asks the model for attention
        return
    signature = inspect.signature(generate)

    @wrap(GeneratorHubInterface, "generate")
    def generate_with_attention(self: Any, tokenized_sentences: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tokenized_sentences, Tensor) and tokenized_sentences.dim() == 1:
            return generate_with_attention(self, tokenized_sentences.unsqueeze(0), *args, **kwargs)[0]
        given = signature.bind(self, tokenized_sentences, *args, **kwargs).arguments.get("inference_step_args") or {}
        if any(isinstance(value, Tensor) and value.dim() and (value != value[:1]).any() for value in given.values()):
            raise ValueError("inference_step_args of single sentences are not supported for a batch: pass one sentence")
        asked = {**self.cfg.generation, **kwargs}
        if asked.get("score_reference") and any(isinstance(each, FairseqEncoderDecoderModel) for each in self.models):
            raise ValueError(
                "score_reference and score() take no source, so they are for language models; use fairseq-generate "
                "--score-reference to score translations"
            )
        if self.cfg.generation.retain_dropout:
            del asked["retain_dropout"]
        refuse_unread(asked, UNREAD_BY_GENERATE, "generate")
        for option in kwargs.keys() - self.cfg.generation.keys():
            if tasks_with(option):
                raise ValueError(f"{option} is an option of a task: give it to from_pretrained")
            if option not in signature.parameters:
                logger.warning(f"{option} does nothing: it is not an option of a search")
        arguments = signature.bind(self, tokenized_sentences, *args, **kwargs).arguments
        if arguments.get("skip_invalid_size_inputs"):
            return generate_with_skipped(generate_with_attention, arguments)
        if (log := logging.getLogger("fairseq.tasks.fairseq_task")).level == logging.NOTSET:
            log.setLevel(logging.WARNING)
        with reporting_attention(self.models) if asked.get("print_alignment") else contextlib.nullcontext():
            return generate(self, tokenized_sentences, *args, **kwargs)


def make_tasks_copyable() -> None:
    """Allow copies of tasks, and of hubs, which contain tasks; fairseq's copy of a task recurses endlessly."""
    if not raises(RecursionError, copy.copy, StatefulContainer()):  # the probe
        return
    find = StatefulContainer.__getattr__

    @wrap(StatefulContainer, "__getattr__")
    def look(self: Any, name: str) -> Any:
        if name.startswith("_"):  # a special attribute of Python, or one that the copy does not have yet
            raise AttributeError(name)
        return find(self, name)
