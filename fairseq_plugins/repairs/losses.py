"""The label-smoothed loss on a CPU in one pass over the logits."""

from __future__ import annotations

from typing import Any

from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.models import FairseqEncoderDecoderModel
from torch import Tensor

from fairseq_plugins.common.output_layer import has_plain_softmax
from fairseq_plugins.cpu.training import label_smoothed_nll_loss
from fairseq_plugins.repairs.wrapping import wrap


def smooth_in_one_pass() -> None:
    """Compute ``--criterion label_smoothed_cross_entropy`` on a CPU without fairseq's five copies of the logits.

    The system must provide cleared memory for these copies at each update.  The formula is unchanged, and results
    differ only by rounding.  No probe is needed, because results are unchanged.
    """
    compute = LabelSmoothedCrossEntropyCriterion.compute_loss

    @wrap(LabelSmoothedCrossEntropyCriterion, "compute_loss")
    def compute_loss(
        self: Any, model: Any, net_output: Any, sample: dict[str, Any], reduce: bool = True
    ) -> tuple[Tensor, Tensor]:
        own = getattr(model.get_normalized_probs, "__self__", None)  # the model in a wrapper for several processes
        if (
            reduce
            and not self.ignore_prefix_size
            and isinstance(own, FairseqEncoderDecoderModel)
            and has_plain_softmax(own)
            and net_output[0].device.type == "cpu"
        ):
            target = model.get_targets(sample, net_output)
            return label_smoothed_nll_loss(net_output[0].flatten(0, -2), target.flatten(), self.eps, self.padding_idx)
        return compute(self, model, net_output, sample, reduce)
