"""What does not go with a model says so."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_DATACLASS_REGISTRY
from fairseq.tasks import TASK_DATACLASS_REGISTRY
from fairseq.tasks.multilingual_translation import MultilingualTranslationTask
from omegaconf.errors import OmegaConfBaseException

from fairseq_plugins.compat.wrapping import in_place_of

__all__ = ["missing_in_the_task", "refuse_adaptive_loss_of_a_full_softmax", "refuse_models_of_one_pair_of_languages"]

OF_THE_TASK = "${task."  # how a model's options refer to its task's


def refuse_adaptive_loss_of_a_full_softmax() -> None:
    """``--criterion adaptive_loss`` fails without a word where a model has no adaptive softmax.

    The probe comes with the error: whether it says anything.
    """
    compute = AdaptiveLoss.forward

    @in_place_of(AdaptiveLoss, "forward")
    def forward(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return compute(self, model, *args, **kwargs)
        except AssertionError as error:
            if str(error) or getattr(model.decoder, "adaptive_softmax", None) is not None:
                raise
            raise ValueError(
                "--criterion adaptive_loss is for a model with an adaptive softmax, and this one has a softmax of all "
                "words: take label_smoothed_cross_entropy or cross_entropy"
            ) from None


def refuse_models_of_one_pair_of_languages() -> None:
    """``--task multilingual_translation`` fails inside of the options where a model is of two languages.

    The probe comes with the error: whether it is of the options.
    """
    build = MultilingualTranslationTask.build_model

    @in_place_of(MultilingualTranslationTask, "build_model")
    def build_model(self: Any, args: Any, *more: Any, **others: Any) -> Any:
        try:
            return build(self, args, *more, **others)
        except OmegaConfBaseException:
            raise ValueError(
                f"--task multilingual_translation takes --arch multilingual_transformer and its like, not "
                f"{args._name}; one model for all pairs of languages trains with --task translation_multi_simple_epoch"
            ) from None


def missing_in_the_task(args: Namespace) -> Iterator[str]:
    """The options of the task that the model of a command line takes, and the task has not."""
    model = MODEL_DATACLASS_REGISTRY.get(ARCH_MODEL_NAME_REGISTRY.get(getattr(args, "arch", None)))
    task = TASK_DATACLASS_REGISTRY.get(getattr(args, "task", None))
    for name, field in getattr(model, "__dataclass_fields__", {}).items():
        value = str(getattr(args, name, field.default))
        option = value.removeprefix(OF_THE_TASK).removesuffix("}")
        if value.startswith(OF_THE_TASK) and option not in getattr(task, "__dataclass_fields__", {}):
            yield option
