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

    The output layer computes only the rows of these words, and only they receive gradients.  Label smoothing covers the
    same words.  Validation uses the same objective, whose losses are smaller than losses over the whole vocabulary.

    The criterion logs ``candidates``, the number of words that a batch uses, and ``coverage``, the percentage of target
    words (including ends of sentences) that are candidates even without the references.

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
        """Return loss, sample size and log; the number of candidates needs the only synchronisation."""
        target = sample["target"]
        mask = self.task.candidates.mask(sample["net_input"]["src_tokens"])
        covered = (mask[target] & target.ne(self.padding_idx)).sum()
        mask.index_fill_(0, target.flatten(), True)
        words = mask.nonzero().squeeze(1)
        # Padding, like all special symbols, has the same index among the candidates.
        sample = {**sample, "target": torch.searchsorted(words, target)}
        with candidate_output(model, words):
            loss, sample_size, logging_output = super().forward(model, sample, reduce)
        logging_output.update(candidates=len(words), covered=covered, batches=1)
        return loss, sample_size, logging_output

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Log the loss, the mean number of candidates per batch, and the coverage per word."""
        super().reduce_metrics(logging_outputs)
        total = {
            name: sum(log.get(name, 0) for log in logging_outputs)
            for name in ("candidates", "batches", "covered", "ntokens")
        }
        metrics.log_scalar("candidates", total["candidates"] / total["batches"], total["batches"], round=2)
        metrics.log_scalar("coverage", 100 * total["covered"] / total["ntokens"], total["ntokens"], round=2)
