"""Repairs of fairseq's Python interface: ``from_pretrained``, and the hub that it returns."""

from __future__ import annotations

import contextlib
import inspect
import logging
from argparse import Namespace
from typing import Any

from fairseq import checkpoint_utils, hub_utils, utils
from fairseq.hub_utils import GeneratorHubInterface
from fairseq.models import FairseqEncoderDecoderModel
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY
from fairseq.tasks.translation import TranslationTask
from omegaconf import DictConfig, open_dict
from torch import Tensor

from fairseq_plugins.repairs.refusals import refuse
from fairseq_plugins.repairs.wrapping import replaced, wrap


def options_of(task: str | None) -> set[str]:
    """Return the names of a task's options, or an empty set if the task defines its options with argparse."""
    return set(getattr(TASK_DATACLASS_REGISTRY.get(task), "__dataclass_fields__", ()))


def tasks_with(option: str) -> str:
    """Return the names of all tasks that have this option."""
    return ", ".join(name for name in TASK_DATACLASS_REGISTRY if option in options_of(name))


@wrap(checkpoint_utils, "overwrite_args_by_name")
def use_given_task(overwrite: Any, cfg: DictConfig, overrides: dict[str, Any]) -> None:
    """Use the ``task`` and task options given to ``from_pretrained``; fairseq silently uses the checkpoint's task."""
    task, asked = cfg.get("task"), overrides.get("task")
    if isinstance(task, DictConfig) and not isinstance(asked, dict):  # fairseq itself reads a task given as a dict
        with open_dict(task):
            if asked in TASK_DATACLASS_REGISTRY:
                task._name = asked
            # The dataclass has defaults for the new task's other options.
            for option in options_of(task.get("_name")) & overrides.keys():
                task[option] = overrides[option]
    overwrite(cfg, overrides)


@wrap(hub_utils, "from_pretrained")
def refuse_unread_options(load: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse names of unregistered components, options of other tasks, and options that fairseq ignores (``beam``)."""
    if "user_dir" in kwargs:  # user_dir may register components
        utils.import_user_module(Namespace(user_dir=kwargs["user_dir"]))
    names = {option: registry["registry"] for option, registry in REGISTRIES.items()} | {"task": TASK_REGISTRY}
    for option in kwargs.keys() & names.keys():
        if isinstance(name := kwargs[option], str) and name not in names[option]:
            raise ValueError(f"{option}={name!r} is not registered; use one of {', '.join(sorted(names[option]))}")
    loaded = load(*args, **kwargs)
    cfg = loaded["args"]
    task, asked = getattr(cfg.get("task"), "_name", None), kwargs.get("task")
    if isinstance(asked, str) and task not in (None, asked):
        raise ValueError(
            f"task={asked!r} cannot load a checkpoint of the task {task}; use another checkpoint, or leave out task"
        )
    if not issubclass(TASK_REGISTRY.get(task, object), TranslationTask):
        return loaded  # speech models have their own interface
    refuse("from_pretrained", kwargs, kwargs.get("generation_args"))
    sections = [section for section in cfg.values() if isinstance(section, DictConfig | Namespace)]
    for option in kwargs.keys() - cfg.keys():
        if tasks_with(option) and not any(option in section for section in sections):
            raise ValueError(f"{option} is not an option of task={task!r}; set task to one of {tasks_with(option)}")
    return loaded


@wrap(GeneratorHubInterface, "generate")
def generate_as_asked(generate: Any, self: Any, tokenized_sentences: Any, *args: Any, **kwargs: Any) -> Any:
    """Repair the hub's ``generate``: compute alignments, and read or refuse the options that fairseq ignores.

    In fairseq

    - ``print_alignment`` crashes, because models are prepared without attention.
    - ``score`` crashes with a translation model, because ``score`` has no argument for the source.
    - ``replace_unk`` and the options of the task are ignored; for a single sentence, all options except the beam are
      ignored.
    - ``generate`` sorts sentences but not their prefixes, so a sentence may get the prefix of another sentence.
    - each call logs four lines about batches.
    """
    if isinstance(tokenized_sentences, Tensor) and tokenized_sentences.dim() == 1:
        return self.generate(tokenized_sentences.unsqueeze(0), *args, **kwargs)[0]
    call = inspect.signature(generate).bind(self, tokenized_sentences, *args, **kwargs)
    given = call.arguments.get("inference_step_args") or {}
    if any(isinstance(value, Tensor) and value.dim() and (value != value[:1]).any() for value in given.values()):
        raise ValueError("inference_step_args must be equal for all sentences of a batch; pass one sentence")
    if any(isinstance(each, FairseqEncoderDecoderModel) for each in self.models):
        refuse("hub.generate", kwargs | ({"retain_dropout": None} if self.cfg.generation.retain_dropout else {}))
    for option in kwargs.keys() - self.cfg.generation.keys():
        if tasks_with(option):
            raise ValueError(f"{option} is an option of a task: give it to from_pretrained")
    if (log := logging.getLogger("fairseq.tasks.fairseq_task")).level == logging.NOTSET:
        log.setLevel(logging.WARNING)
    with contextlib.ExitStack() as stack:
        if {**self.cfg.generation, **kwargs}.get("print_alignment"):
            for silent in (module for module in self.modules() if not getattr(module, "need_attn", True)):
                stack.enter_context(replaced(silent, "need_attn", True))
        return generate(self, tokenized_sentences, *args, **kwargs)
