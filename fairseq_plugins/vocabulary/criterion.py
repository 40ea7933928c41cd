"""Cross-entropy over the candidate words of a batch (Mi et al. 2016, arXiv 1605.03209; L'Hostis et al. 2016)."""

from __future__ import annotations

from typing import Any

import torch
from fairseq.criterions import register_criterion
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
)
from fairseq.logging import metrics
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask

from fairseq_plugins.common.output_layer import candidate_output


@register_criterion("vocab_selection_cross_entropy", dataclass=LabelSmoothedCrossEntropyCriterionConfig)
class VocabSelectionCrossEntropy(LabelSmoothedCrossEntropyCriterion):
    """fairseq's label-smoothed cross-entropy over the candidates of each batch and the words of its references.

    The output layer computes only the rows of these words, so only these rows receive gradients.  Label smoothing also
    distributes probability only among these words.  Validation uses the same loss, which is smaller than a loss over
    the whole vocabulary, so do not compare the two.

    The criterion logs two numbers.  ``candidates`` is the number of words in the output layer of a batch.  ``coverage``
    is the percentage of target words, including ends of sentences, that would be candidates without the references.

    Args:
        task: `translation_fast` with ``--candidates``.
        sentence_avg, label_smoothing, ignore_prefix_size, report_accuracy: see fairseq's criterion.
    """

    @classmethod
    def build_criterion(cls, cfg: LabelSmoothedCrossEntropyCriterionConfig, task: FairseqTask) -> Any:
        """Build the criterion.

        Raises:
            ValueError: the task has no candidates.
        """
        if getattr(task, "candidates", None) is None:
            raise ValueError(
                "--criterion vocab_selection_cross_entropy needs --task translation_fast with --candidates"
            )
        return super().build_criterion(cfg, task)

    def forward(self, model: BaseFairseqModel, sample: dict[str, Any], reduce: bool = True) -> Any:
        """Return loss, sample size and log.

        Only the number of candidates, which is a size of tensors, needs a synchronisation with the device.
        """
        target = sample["target"]
        mask = self.task.candidates.mask(sample["net_input"]["src_tokens"])
        covered = (mask[target] & target.ne(self.padding_idx)).sum()
        mask.index_fill_(0, target.flatten(), True)
        words = mask.nonzero().squeeze(1)
        # Padding keeps its index, because the special symbols are the first candidates.
        sample = {**sample, "target": torch.searchsorted(words, target)}
        with candidate_output(model, words):
            loss, sample_size, logging_output = super().forward(model, sample, reduce)
        logging_output.update(candidates=len(words), covered=covered, batches=1)
        return loss, sample_size, logging_output

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Log the loss, the mean number of candidates per batch, and the coverage of all target words."""
        super().reduce_metrics(logging_outputs)
        total = {
            name: sum(log.get(name, 0) for log in logging_outputs)
            for name in ("candidates", "batches", "covered", "ntokens")
        }
        metrics.log_scalar("candidates", total["candidates"] / total["batches"], total["batches"], round=2)
        metrics.log_scalar("coverage", 100 * total["covered"] / total["ntokens"], total["ntokens"], round=2)
