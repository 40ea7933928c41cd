"""Options of the learning-rate schedules."""

from dataclasses import dataclass, field
from typing import List

from fairseq.dataclass import FairseqDataclass
from omegaconf import II

__all__ = ["AnnealAfterPlateauConfig"]


# fairseq reads these annotations at run time: they must be types, not postponed strings, and it knows no `list[float]`.
@dataclass
class AnnealAfterPlateauConfig(FairseqDataclass):
    lr_shrink: float = field(
        default=0.1, metadata={"help": "factor of the learning rate after each epoch of annealing"}
    )
    lr: List[float] = II("optimization.lr")
    maximize_best_checkpoint_metric: bool = II("checkpoint.maximize_best_checkpoint_metric")
