"""fairseq's Python interface: ``from_pretrained``, and what it returns."""

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
from fairseq.models import BaseFairseqModel, FairseqEncoderDecoderModel
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY
from fairseq.tasks.fairseq_task import StatefulContainer
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import Tensor, nn

from fairseq_plugins.repairs.wrapping import in_place_of, raises

logger = logging.getLogger(__name__)

# What is passed over in silence, and what does it.
WHOLE_BEAM = {"nbest": "generate returns the whole beam, the best translation first"}
NOT_IN_LOADING = WHOLE_BEAM | {
    "beam": "give it to translate or generate",
    "fp16": "what from_pretrained returns has half(), as every module of torch",
    "model_overrides": "give the options themselves to from_pretrained",
}
NOT_IN_SEARCHING = WHOLE_BEAM | {
    "replace_unk": "fairseq-interactive --replace-unk replaces unknown words",
    "retain_dropout": "from_pretrained takes it",
    "lm_path": "fairseq-generate --lm-path takes a language model",
    "lm_weight": "fairseq-generate --lm-path takes a language model",
    "sacrebleu": "fairseq-generate --scoring sacrebleu scores translations",
    "prefix_size": 'generate takes inference_step_args={"prefix_tokens": ...}',
}

# The parts of a configuration that translating from Python reads; the others are of training and of commands.
READ = {"task", "model", "generation", "dataset", "tokenizer", "bpe"}


def options_of(task: str | None) -> set[str]:
    """What the task of that name has; nothing where it takes its options in fairseq's old way."""
    return set(getattr(TASK_DATACLASS_REGISTRY.get(task), "__dataclass_fields__", ()))


def tasks_with(option: str) -> str:
    """The names of all tasks that have it."""
    return ", ".join(name for name in TASK_DATACLASS_REGISTRY if option in options_of(name))


def keeps_the_task_of_the_checkpoint(overwrite: Callable[..., None]) -> bool:
    """Probe: whether ``overwrite`` passes over the name of another task."""
    cfg = OmegaConf.create({"task": {"_name": "translation"}})
    overwrite(cfg, {"task": "language_modeling"})
    return bool(cfg.task._name == "translation")


def take_the_task_asked_for() -> None:
    """``from_pretrained(..., task="translation_fast")`` goes on with the task of the checkpoint, without a word, and
    without the options that the checkpoint's has not.  So do ``from_pretrained(..., bpe=...)`` and
    ``fairseq-validate --criterion`` with those of the checkpoint.
    """
    overwrite = checkpoint_utils.overwrite_args_by_name
    if not keeps_the_task_of_the_checkpoint(overwrite):
        return

    @in_place_of(checkpoint_utils, "overwrite_args_by_name")
    def overwrite_args_by_name(cfg: DictConfig, overrides: dict[str, Any]) -> None:
        task, asked = cfg.get("task"), overrides.get("task")
        if isinstance(task, DictConfig) and not isinstance(asked, dict):  # fairseq itself understands a whole task
            with open_dict(task):
                if asked in TASK_DATACLASS_REGISTRY:
                    task._name = asked
                for option in options_of(task.get("_name")) & overrides.keys():  # the others get defaults
                    task[option] = overrides[option]
        for kind in REGISTRIES.keys() & cfg.keys():
            part, asked = cfg[kind], overrides.get(kind)
            if isinstance(part, DictConfig) and isinstance(asked, str) and part.get("_name") != asked:
                with open_dict(cfg):
                    cfg[kind] = None  # fairseq puts the other part where there is none
        overwrite(cfg, overrides)


def refuse_ignored(asked: dict[str, Any], instead: dict[str, str]) -> None:
    """Refuse options that do nothing, but where they ask for what is done anyway."""
    for option, advice in instead.items():
        if asked.get(option) not in (None, False, 0, getattr(GenerationConfig, option, None)):
            raise ValueError(f"{option} does nothing here; {advice}")


def refuse_options_of_other_tasks() -> None:
    """``from_pretrained(..., cpu_dtype="int8")`` does nothing, and says nothing, where the task has no such option, and
    so does an option that nobody has, or nobody reads.  A name that nobody has fails elsewhere.

    There is nothing to probe: what has been taken is found in the configuration.
    """
    load = hub_utils.from_pretrained
    read_by_the_hub = {*inspect.signature(load).parameters, "user_dir"}
    if "generation_args" in load.__code__.co_consts:  # which fairseq 0.12.2 does not read
        read_by_the_hub.add("generation_args")

    @in_place_of(hub_utils, "from_pretrained")
    def from_pretrained(*args: Any, **kwargs: Any) -> dict[str, Any]:
        if "user_dir" in kwargs:  # may register names
            utils.import_user_module(Namespace(user_dir=kwargs["user_dir"]))
        asked = kwargs.get("task")
        names = {option: registry["registry"] for option, registry in REGISTRIES.items()} | {"task": TASK_REGISTRY}
        for option in kwargs.keys() & names.keys():
            if isinstance(name := kwargs[option], str) and name not in names[option]:
                raise ValueError(f"there is no {option} {name!r}, but {', '.join(sorted(names[option]))}")
        loaded = load(*args, **kwargs)
        if loaded["models"] is None:  # a vocoder of speech, which its class makes
            return loaded
        # Models of speech have a from_pretrained of their own, and search with what it is given.
        load_class = type(loaded["models"][0]).from_pretrained.__func__
        if load_class is BaseFairseqModel.from_pretrained.__func__ or not load_class.__module__.startswith("fairseq."):
            refuse_ignored({**kwargs, **(kwargs.get("generation_args") or {})}, NOT_IN_LOADING)
        cfg = loaded["args"]
        name = getattr(cfg.get("task"), "_name", None)
        if isinstance(asked, str) and isinstance(cfg.task, DictConfig) and name != asked:
            raise ValueError(f"a checkpoint of the task {name} cannot be given to {asked}")
        parts = {part: cfg[part] for part in cfg if isinstance(cfg[part], DictConfig | dict | Namespace)}
        for option in kwargs.keys() - options_of(name) - read_by_the_hub - READ:
            places = {part for part, options in parts.items() if option in options}
            if not places and tasks_with(option):
                raise ValueError(f"{option} is no option of the task {name}; give task=, one of {tasks_with(option)}")
            if not places & READ:
                logger.warning(f"{option} does nothing: it is no option of translating")
        return loaded


@contextlib.contextmanager
def attention_reported(models: nn.Module) -> Iterator[None]:
    """Within this, models that were prepared without attention report it."""
    silent = [module for module in models.modules() if not getattr(module, "need_attn", True)]
    for module in silent:
        module.need_attn = True  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in silent:
            module.need_attn = False  # type: ignore[assignment]


def generate_what_fits(generate: Callable[..., Any], arguments: dict[str, Any]) -> list[list[dict[str, Tensor]]]:
    """Translate with ``skip_invalid_size_inputs``: a skipped sentence keeps its place, with an empty translation.

    fairseq leaves it out, so that the translations behind it belong to other sentences.
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
    """The hub prepares models without attention, and then fails where ``print_alignment`` asks for it.

    It fails in ``score`` too, which has no place for the source of a translation; it passes over what is an option of
    the task, ``replace_unk``, and for one sentence all but the beam; it sorts sentences, but not their prefixes; and it
    logs four lines for each call.
    """
    generate = GeneratorHubInterface.generate
    if "need_attn" in generate.__code__.co_names:  # the probe: somebody asks for attention
        return
    signature = inspect.signature(generate)

    @in_place_of(GeneratorHubInterface, "generate")
    def generate_with_attention(self: Any, tokenized_sentences: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tokenized_sentences, Tensor) and tokenized_sentences.dim() == 1:
            return generate_with_attention(self, tokenized_sentences.unsqueeze(0), *args, **kwargs)[0]
        given = signature.bind(self, tokenized_sentences, *args, **kwargs).arguments.get("inference_step_args") or {}
        if any(isinstance(value, Tensor) and value.dim() and (value != value[:1]).any() for value in given.values()):
            raise ValueError("inference_step_args: sentences change places, and these would not; give one at a time")
        asked = {**self.cfg.generation, **kwargs}
        if asked.get("score_reference") and any(isinstance(each, FairseqEncoderDecoderModel) for each in self.models):
            raise ValueError(
                "score() and score_reference are for language models here, for there is no place for the translation "
                "of a source; fairseq-generate --score-reference scores translations"
            )
        if self.cfg.generation.retain_dropout:
            del asked["retain_dropout"]
        refuse_ignored(asked, NOT_IN_SEARCHING)
        for option in kwargs.keys() - self.cfg.generation.keys():
            if tasks_with(option):
                raise ValueError(f"{option} is an option of a task: give it to from_pretrained")
            if option not in signature.parameters:
                logger.warning(f"{option} does nothing: a search has no such option")
        arguments = signature.bind(self, tokenized_sentences, *args, **kwargs).arguments
        if arguments.get("skip_invalid_size_inputs"):
            return generate_what_fits(generate_with_attention, arguments)
        if (log := logging.getLogger("fairseq.tasks.fairseq_task")).level == logging.NOTSET:
            log.setLevel(logging.WARNING)  # four lines about batches for each call
        with attention_reported(self.models) if asked.get("print_alignment") else contextlib.nullcontext():
            return generate(self, tokenized_sentences, *args, **kwargs)


def cannot_be_copied(container: object) -> bool:
    """Probe: whether an object without attributes yet looks for them without end."""
    return raises(RecursionError, copy.copy, container)


def copy_the_state_of_tasks() -> None:
    """A task cannot be copied, and so neither what ``from_pretrained`` returns: a copy of its state, which has nothing
    yet, asks itself for what it has.
    """
    if not cannot_be_copied(StatefulContainer()):
        return
    find = StatefulContainer.__getattr__

    @in_place_of(StatefulContainer, "__getattr__")
    def look(self: Any, name: str) -> Any:
        if name.startswith("_"):  # of Python's, or not there yet
            raise AttributeError(name)
        return find(self, name)
