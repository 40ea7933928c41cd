"""Expected risk (Edunov et al. 2018, Classical Structured Prediction Losses, arXiv 1711.04956).

B sentences, at most K hypotheses per sentence, R rows to score: first the references, then the hypotheses.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from fairseq import utils
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.logging import metrics
from fairseq.models import FairseqEncoderDecoderModel
from fairseq.models.nat import FairseqNATModel
from fairseq.tasks import FairseqTask
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fairseq_plugins.common.options import check_ranges
from fairseq_plugins.common.output_layer import candidate_output
from fairseq_plugins.common.text import UNKNOWN_IN_HYPOTHESIS, UNKNOWN_IN_REFERENCE, bpe_symbol, can_score
from fairseq_plugins.sequence_risk.config import SENTENCE_SCORES, SequenceRiskConfig
from fairseq_plugins.sequence_risk.hypotheses import HypothesisGenerator, Rows, RowScores, score_rows

logger = logging.getLogger(__name__)


@register_criterion("sequence_risk", dataclass=SequenceRiskConfig)
class SequenceRisk(FairseqCriterion):
    """The loss ``α TokLS + (1 - α) Risk`` per sentence, with ``Risk = Σ_u p(u) cost(u)`` for hypotheses u.

    TokLS is the label-smoothed cross-entropy of the reference, averaged over its words.  p(u) is a softmax over the
    hypotheses of a sentence.  The logit of a hypothesis is ``--risk-scale`` times its mean log-probability per word.
    Hypotheses are generated without dropout and scored with dropout.  ``--candidates`` of the task restricts the
    vocabulary in generation and scoring.

    The criterion logs averages over sentences: ``risk``, the expected cost; ``best``, the cost of the model's best
    hypothesis; ``oracle``, the lowest cost of a hypothesis; and ``translations``, the number of hypotheses.  The
    criterion also logs two durations, in seconds per batch.  ``search`` is the time to generate hypotheses.
    ``scoring`` is the time to compute costs and loss, without the backward pass.  On a GPU, ``scoring`` does not
    include operations that are still queued.
    """

    def __init__(self, task: FairseqTask, cfg: SequenceRiskConfig) -> None:
        super().__init__(task)
        check_ranges(cfg, SequenceRiskConfig)
        count = cfg.risk_hypotheses if cfg.risk_candidates is None else cfg.risk_candidates
        if count == 1 and not cfg.risk_reference:
            raise ValueError("--risk-hypotheses must be at least 2 without --risk-reference, got 1")
        if count >= len(task.target_dictionary):
            raise ValueError(
                f"--risk-hypotheses must be below the {len(task.target_dictionary)} words of the target dictionary, "
                f"got {count}"
            )
        if getattr(getattr(task, "args", None), "decoder_langtok", False):
            raise ValueError("--decoder-langtok does not work with --criterion sequence_risk: leave one out")
        self.dictionary = task.target_dictionary
        targets = {pair.rpartition("-")[2] for pair in getattr(task, "lang_pairs", ())}
        if any(task.dicts.get(language, self.dictionary) != self.dictionary for language in targets):
            raise ValueError(
                "--criterion sequence_risk needs one dictionary for all target languages: "
                "preprocess all languages with the same --tgtdict"
            )
        words = self.dictionary.symbols[self.dictionary.nspecial :]
        cost = str(cfg.risk_cost)
        is_rouge = "rouge" in cost
        if is_rouge and not can_score(words):
            raise ValueError(f"--risk-cost {cost} reads only the letters a to z and digits: use chrf or bleu")
        self.bpe_symbol = bpe_symbol(words)
        self.unknown_words = UNKNOWN_IN_REFERENCE, UNKNOWN_IN_HYPOTHESIS
        if is_rouge:  # ROUGE ignores characters other than letters and digits
            self.unknown_words = "unknownofreference", "unknownofhypothesis"
        self._checks_spaces = cost == "bleu"
        self.includes_reference, self.scale = cfg.risk_reference, cfg.risk_scale
        self.alpha, self.epsilon = cfg.risk_alpha, cfg.label_smoothing
        self.score = SENTENCE_SCORES[cost]()
        self.generator = HypothesisGenerator(task, count, cfg.risk_sampling)
        self.candidates = getattr(task, "candidates", None)

    def forward(self, model: Any, sample: dict[str, Any], reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        """Return the summed loss of all sentences, the number of sentences, and the log."""
        inner = _unwrapped(model)
        try:
            return self._forward(model, inner, sample, reduce)
        except RuntimeError as error:
            if "memory" not in str(error):
                raise
            # If the message contains "out of memory", fairseq skips the batch on a GPU.
            raise RuntimeError(
                f"--risk-hypotheses {self.generator.count}: out of memory for {len(sample['target'])} sentences; "
                f"reduce it or --max-tokens ({error})"
            ) from error

    def _forward(
        self, model: Any, inner: Any, sample: dict[str, Any], reduce: bool
    ) -> tuple[Tensor, int, dict[str, Any]]:
        start = time.perf_counter()
        hypotheses = self.generator.generate(inner, sample)
        searched = time.perf_counter()
        rows, sets = self.hypothesis_sets(sample, hypotheses)
        scores = self._scores(model, inner, sample["net_input"], rows)
        costs = _padded([each.costs for each in sets], math.inf, torch.float64).to(scores.tokens)
        members = _padded([each.rows for each in sets], 0, torch.long).to(costs.device)
        loss, nll, risk = self.losses(scores, rows, costs, members)
        log = {
            "loss": loss.detach().sum(),
            "nll_loss": nll.detach().sum(),
            "ntokens": sample["ntokens"],
            "nsentences": len(sets),
            "sample_size": len(sets),
            "batches": 1,
            "risk": risk.detach().sum(),
            "best": sum(each.best for each in sets),
            "oracle": sum(min(each.costs) for each in sets),
            "translations": sum(len(each.rows) for each in sets),
            "search": searched - start,
            "scoring": time.perf_counter() - searched,
        }
        return loss.sum() if reduce else loss, len(sets), log

    def hypothesis_sets(
        self, sample: dict[str, Any], hypotheses: list[list[list[int]]]
    ) -> tuple[Rows, list[HypothesisSet]]:
        """Compute the costs of all hypotheses; return the rows to score, and the `HypothesisSet` of each sentence.

        Equal rows of a sentence are scored only once.
        """
        references = [[word for word in row if word != self.padding_idx] for row in sample["target"].tolist()]
        tokens, sentences, sets = list(references), list(range(len(references))), []
        texts = [self.text(reference, self.unknown_words[0]) for reference in references]
        self._warn_without_spaces(texts, references)
        for sentence, (reference, correct, found) in enumerate(zip(references, texts, hypotheses, strict=True)):
            score = self.score(correct)
            row_of = {tuple(reference): sentence}
            cost_of = {}
            for each in dict.fromkeys(map(tuple, [*found, reference] if self.includes_reference else found)):
                text = self.text(each, self.unknown_words[1])
                cost_of[each] = 0.0 if text == correct else 1 - score(text)
                if each not in row_of:
                    row_of[each] = len(tokens)
                    tokens.append(list(each))
                    sentences.append(sentence)
            sets.append(
                HypothesisSet([row_of[each] for each in cost_of], list(cost_of.values()), cost_of[tuple(found[0])])
            )
        before = sample["net_input"]["prev_output_tokens"].tolist()  # rows are padded on the left or on the right
        first = [next(word for word in row if word != self.padding_idx) for row in before]
        return Rows(tokens, sentences, first), sets

    def _warn_without_spaces(self, texts: list[str], references: list[list[int]]) -> None:
        """Warn if the first batch of long sentences has no spaces, because BLEU then reads a sentence as one word."""
        if self._checks_spaces and sum(map(len, references)) > 5 * len(texts):
            self._checks_spaces = False
            if sum(len(text.split()) for text in texts) < 2 * len(texts):
                logger.warning(
                    "--risk-cost bleu needs words separated by spaces, and the references have few: use chrf"
                )

    def text(self, tokens: Iterable[int], unknown: str) -> str:
        """Return the text of tokens, without BPE; ``unknown`` replaces unknown words."""
        return self.dictionary.string(tokens, self.bpe_symbol, unk_string=unknown)

    def _scores(self, model: Any, inner: Any, net_input: dict[str, Any], rows: Rows) -> RowScores:
        words: Tensor | None = None
        output: AbstractContextManager[None] = nullcontext()
        if self.candidates is not None:
            words = self.candidates.words(net_input["src_tokens"], torch.tensor(list(chain(*rows.tokens))))
            output = candidate_output(inner, words)
        # A wrapper for distributed training synchronises gradients only if the wrapper itself is called.
        # The wrapper calls `forward` of the model, so replace `forward` by the scoring function.
        inner.forward = partial(score_rows, inner, net_input, rows, self.padding_idx)
        try:
            with output:
                return model(words)  # pass an argument, because torch's DataParallel fails without one
        finally:
            del inner.forward

    def losses(self, scores: RowScores, rows: Rows, costs: Tensor, members: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return loss, negative log-likelihood of the reference, and risk of each sentence, (B,) each.

        Args:
            scores: scores of all rows.
            rows: tokens of all rows.
            costs: costs of the hypotheses, (B, K), padded with infinity for sentences with fewer than K hypotheses.
            members: index of each hypothesis among the rows, (B, K).
        """
        lengths = torch.tensor([len(row) for row in rows.tokens], device=costs.device)
        totals = scores.tokens.sum(dim=1)
        logits = (totals / lengths)[members] * self.scale
        missing = costs.isinf()
        p = logits.masked_fill(missing, -math.inf).softmax(dim=1)
        risk = (p * costs.masked_fill(missing, 0)).sum(dim=1)

        references = len(rows.first)
        nll, smooth = -totals[:references], -scores.sums.sum(dim=1)
        others = self.epsilon / (scores.words - 1)
        token_loss = ((1 - self.epsilon - others) * nll + others * smooth) / lengths[:references]
        return self.alpha * token_loss + (1 - self.alpha) * risk, nll, risk

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Log averages per sentence, the perplexity per word, and times per batch."""
        total: dict[str, Any] = defaultdict(float)
        for log in logging_outputs:
            for name, value in log.items():
                total[name] += value
        sentences, batches = total["nsentences"], total["batches"]
        for name in ("loss", "risk", "best", "oracle", "translations"):
            # BLEU is logged as a fraction of 1, so fairseq's usual three decimals would round it to 0.1 BLEU.
            # Steps of 0.1 BLEU are too coarse to compare checkpoints by --best-checkpoint-metric.
            metrics.log_scalar(name, total[name] / sentences, sentences, round=5)
        bits = total["nll_loss"] / total["ntokens"] / math.log(2)
        metrics.log_scalar("nll_loss", bits, total["ntokens"], round=3)
        metrics.log_derived("ppl", lambda meters: utils.get_perplexity(meters["nll_loss"].avg))
        for name in ("search", "scoring"):
            metrics.log_scalar(name, total[name] / batches, batches, round=3)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """Return True: logs of several processes can be summed."""
        return True


class HypothesisSet(NamedTuple):
    """The distinct hypotheses of a sentence."""

    rows: list[int]  # index of each hypothesis among the rows to score
    costs: list[float]  # cost of each hypothesis
    best: float  # cost of the model's best hypothesis


def _padded(lists: list[list[Any]], value: float, dtype: torch.dtype) -> Tensor:
    return pad_sequence([torch.tensor(each, dtype=dtype) for each in lists], batch_first=True, padding_value=value)


def _unwrapped(model: Any) -> Any:
    """Return the model without wrappers for distributed training."""
    while hasattr(model, "module"):
        model = model.module
    if not isinstance(model, FairseqEncoderDecoderModel) or isinstance(model, FairseqNATModel):
        raise ValueError(
            f"--criterion sequence_risk needs an autoregressive encoder-decoder, got {type(model).__name__}; use "
            "another --arch"
        )
    # fairseq modifies the output of an adaptive softmax in place.
    if getattr(model.decoder, "adaptive_softmax", None) is not None:
        raise ValueError("--criterion sequence_risk needs a plain softmax, got an adaptive one: use another --arch")
    return model
