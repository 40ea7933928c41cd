"""Options of the optimizer and the learning-rate schedules."""

from dataclasses import dataclass, field
from typing import Any, List, Optional

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.optim.adam import FairseqAdamConfig
from omegaconf import II

from fairseq_plugins.ranges import NOT_NEGATIVE, POSITIVE, SIZE, Range

__all__ = ["AnnealAfterPlateauConfig", "SimplexAdamConfig", "WeightedInverseSqrtConfig"]


@dataclass
class AnnealAfterPlateauConfig(FairseqDataclass):
    lr_shrink: float = field(
        default=0.1,
        metadata={
            "help": "factor of the learning rate after each epoch of annealing",
            "range": Range(0, 1, above=True),
        },
    )
    lr: List[float] = II("optimization.lr")
    maximize_best_checkpoint_metric: bool = II("checkpoint.maximize_best_checkpoint_metric")


@dataclass
class SimplexAdamConfig(FairseqAdamConfig):
    adam_betas: Any = field(default=(0.9, 0.98), metadata={"help": "betas for Adam optimizer"})
    adam_eps: float = field(default=1e-9, metadata={"help": "epsilon for Adam optimizer", "range": POSITIVE})
    weight_decay: float = field(default=0.0, metadata={"help": "weight decay", "range": NOT_NEGATIVE})
    branch_step: ChoiceEnum(["adam", "tangent"]) = field(  # type: ignore[valid-type]
        default="adam",
        metadata={"help": "of kappa and alpha, before the projection: Adam's, or with a gradient of mean zero"},
    )
    freeze_branch_weights_after: Optional[int] = field(
        default=None, metadata={"help": "leave kappa and alpha as they are from this update on", "range": NOT_NEGATIVE}
    )


@dataclass
class WeightedInverseSqrtConfig(FairseqDataclass):
    warmup_updates: int = field(
        default=4000, metadata={"help": "updates of rising learning rate for the network", "range": SIZE}
    )
    branch_warmup_updates: int = field(
        default=400, metadata={"help": "updates of rising learning rate for kappa and alpha", "range": SIZE}
    )
    lr_scale: float = field(
        default=1.0, metadata={"help": "factor of the network's learning rate", "range": NOT_NEGATIVE}
    )
    branch_lr_scale: float = field(
        default=1.0, metadata={"help": "factor of the learning rate of kappa and alpha", "range": NOT_NEGATIVE}
    )
    encoder_embed_dim: Optional[int] = field(default=II("model.encoder_embed_dim"), metadata={"range": SIZE})
    # Of the convolutional models it is a list, which is refused when the schedule is made.
    encoder_layers: Optional[str] = II("model.encoder_layers")
