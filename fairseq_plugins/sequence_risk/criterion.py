"""Expected risk (Edunov et al. 2018, Classical Structured Prediction Losses, arXiv 1711.04956).

B sentences, K translations of each at most, R rows: the references and behind them the translations.
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
from fairseq_plugins.common.replaced import replaced
from fairseq_plugins.common.rouge import sees
from fairseq_plugins.common.subwords import bpe_symbol
from fairseq_plugins.sequence_risk.config import SENTENCE_SCORES, SequenceRiskConfig
from fairseq_plugins.sequence_risk.row_scores import Rows, RowScores, score_rows
from fairseq_plugins.sequence_risk.translations import Translator

logger = logging.getLogger(__name__)


@register_criterion("sequence_risk", dataclass=SequenceRiskConfig)
class SequenceRisk(FairseqCriterion):
    """``α TokLS + (1 - α) Risk`` of each sentence, ``Risk = Σ_u p(u) cost(u)`` over translations u of the model.

    p is a softmax over mean log-probabilities, times the scale, and TokLS the mean over the words of the reference.
    Translations are made without dropout and scored with it; where the task has ``--candidates``, among these.

    Logged are the means over sentences of ``risk``, ``best`` and ``oracle``: the expected cost, that of the model's
    best translation, and the lowest; how many ``translations`` were scored; and in seconds for each batch ``search``,
    and ``scoring`` with the costs, without the backward pass (on a GPU until it is queued).

    Args:
        task: a translation task.
        cfg: the options.

    Raises:
        ValueError: a number is out of its range, or the score needs what is not installed or other letters.
    """

    def __init__(self, task: FairseqTask, cfg: SequenceRiskConfig) -> None:
        super().__init__(task)
        check_ranges(cfg, SequenceRiskConfig)
        if cfg.risk_candidates == 1 and not cfg.risk_reference:
            raise ValueError("--risk-candidates 1 has nothing to compare with: take more, or --risk-reference")
        if cfg.risk_candidates >= len(task.target_dictionary):
            raise ValueError(
                f"--risk-candidates must be below the {len(task.target_dictionary)} words of the target dictionary, "
                f"got {cfg.risk_candidates}"
            )
        if getattr(getattr(task, "args", None), "decoder_langtok", False):
            raise ValueError("sequence_risk does not tell a decoder its language, as --decoder-langtok wants")
        self.dictionary = task.target_dictionary
        targets = {pair.rpartition("-")[2] for pair in getattr(task, "lang_pairs", ())}
        if any(task.dicts.get(language, self.dictionary) != self.dictionary for language in targets):
            raise ValueError("sequence_risk reads all languages by one dictionary: make the data with a joined one")
        words = self.dictionary.symbols[self.dictionary.nspecial :]
        cost = str(cfg.risk_cost)
        is_rouge = "rouge" in cost
        if is_rouge and not sees(words):
            raise ValueError(f"--risk-cost {cost} sees only the letters a to z and digits: take chrf or bleu")
        self.bpe_symbol = bpe_symbol(words)
        # Of letters that occur in no text, as long as a word for chrF; for ROUGE, which sees no such letters, words.
        self.unknown = ("unknownofreference", "unknownoftranslation") if is_rouge else ("\ue000" * 8, "\ue001" * 8)
        self._looks_for_words = cost == "bleu"
        self.reference_too, self.scale = cfg.risk_reference, cfg.risk_scale
        self.alpha, self.epsilon = cfg.risk_alpha, cfg.label_smoothing
        self.score = SENTENCE_SCORES[cost]()
        self.translator = Translator(task, cfg.risk_candidates, cfg.risk_sampling)
        self.vocabulary = getattr(task, "candidates", None)

    def forward(self, model: Any, sample: dict[str, Any], reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        """The loss, summed over sentences, their number, and what to log.

        Raises:
            ValueError: the model is no encoder-decoder, or its softmax is adaptive.
            RuntimeError: the translations do not fit into memory.
        """
        inner = _unwrapped(model)
        try:
            return self._forward(model, inner, sample, reduce)
        except RuntimeError as error:
            if "memory" not in str(error):
                raise
            # fairseq skips a batch on a GPU by these words.
            raise RuntimeError(
                f"--risk-candidates {self.translator.count}: out of memory with that many translations of "
                f"{len(sample['target'])} sentences; take fewer, or fewer --max-tokens ({error})"
            ) from error

    def _forward(
        self, model: Any, inner: Any, sample: dict[str, Any], reduce: bool
    ) -> tuple[Tensor, int, dict[str, Any]]:
        start = time.perf_counter()
        translations = self.translator.translate(inner, sample)
        searched = time.perf_counter()
        rows, sets = self.sets(sample, translations)
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

    def sets(self, sample: dict[str, Any], translations: list[list[list[int]]]) -> tuple[Rows, list[_Set]]:
        """What is to be scored, each row once, and the set of each sentence."""
        references = [[word for word in row if word != self.padding_idx] for row in sample["target"].tolist()]
        tokens, sentences, sets = list(references), list(range(len(references))), []
        texts = [self.text(reference, self.unknown[0]) for reference in references]
        self._look_for_words(texts, references)
        for sentence, (reference, wanted, found) in enumerate(zip(references, texts, translations, strict=True)):
            score = self.score(wanted)
            row_of = {tuple(reference): sentence}
            cost_of = {}
            for each in dict.fromkeys(map(tuple, [*found, reference] if self.reference_too else found)):
                text = self.text(each, self.unknown[1])
                cost_of[each] = 0.0 if text == wanted else 1 - score(text)
                if each not in row_of:
                    row_of[each] = len(tokens)
                    tokens.append(list(each))
                    sentences.append(sentence)
            sets.append(_Set([row_of[each] for each in cost_of], list(cost_of.values()), cost_of[tuple(found[0])]))
        before = sample["net_input"]["prev_output_tokens"].tolist()  # padded on either side
        first = [next(word for word in row if word != self.padding_idx) for row in before]
        return Rows(tokens, sentences, first), sets

    def _look_for_words(self, texts: list[str], references: list[list[int]]) -> None:
        """At the first batch of long sentences: one without spaces would be right as a whole, or not at all."""
        if self._looks_for_words and sum(map(len, references)) > 5 * len(texts):
            self._looks_for_words = False
            if sum(len(text.split()) for text in texts) < 2 * len(texts):
                logger.warning("--risk-cost bleu takes what is between spaces for a word, and there are few: take chrf")

    def text(self, tokens: Iterable[int], unknown: str) -> str:
        """Words without BPE; no word of a translation is right in the place of an unknown one of the reference."""
        return self.dictionary.string(tokens, self.bpe_symbol, unk_string=unknown)

    def _scores(self, model: Any, inner: Any, net_input: dict[str, Any], rows: Rows) -> RowScores:
        words: Tensor | None = None
        narrow: AbstractContextManager[None] = nullcontext()
        if self.vocabulary is not None:
            words = self.vocabulary.words(net_input["src_tokens"], torch.tensor(list(chain(*rows.tokens))))
            narrow = candidate_output(inner, words)
        # What wraps a model for several processes must see a call of its own, or it does not add up gradients.
        score = partial(score_rows, inner, net_input, rows, self.padding_idx)
        with narrow, replaced(inner, "forward", score):
            return model(words)  # without an argument, torch's wrapper for several GPUs fails

    def losses(self, scores: RowScores, rows: Rows, costs: Tensor, members: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, negative log-likelihood of the reference, and risk of each sentence.

        Args:
            scores: of all rows.
            rows: these.
            costs: (B, K), infinite where there is no translation.
            members: their rows, (B, K).
        """
        lengths = torch.tensor([len(row) for row in rows.tokens], device=costs.device)
        totals = scores.tokens.sum(dim=1)
        logits = (totals / lengths)[members] * self.scale
        none = costs.isinf()
        p = logits.masked_fill(none, -math.inf).softmax(dim=1)
        risk = (p * costs.masked_fill(none, 0)).sum(dim=1)

        references = len(rows.first)
        nll, smooth = -totals[:references], -scores.sums.sum(dim=1)
        others = self.epsilon / (scores.words - 1)
        token_loss = ((1 - self.epsilon - others) * nll + others * smooth) / lengths[:references]
        return self.alpha * token_loss + (1 - self.alpha) * risk, nll, risk

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Log means of sentences, the perplexity of words, and means of batches."""
        total: dict[str, Any] = defaultdict(float)
        for log in logging_outputs:
            for name, value in log.items():
                total[name] += value
        sentences, batches = total["nsentences"], total["batches"]
        for name in ("loss", "risk", "best", "oracle", "translations"):
            # A step of the third decimal is 0.1 BLEU, too large for what the best checkpoint and patience go by.
            metrics.log_scalar(name, total[name] / sentences, sentences, round=5)
        bits = total["nll_loss"] / total["ntokens"] / math.log(2)
        metrics.log_scalar("nll_loss", bits, total["ntokens"], round=3)
        metrics.log_derived("ppl", lambda meters: utils.get_perplexity(meters["nll_loss"].avg))
        for name in ("search", "scoring"):
            metrics.log_scalar(name, total[name] / batches, batches, round=3)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """They can, across processes."""
        return True


class _Set(NamedTuple):
    """The translations of a sentence that its risk is expected over.

    Attributes:
        rows: of each, its row.
        costs: of each.
        best: the cost of the model's best one.
    """

    rows: list[int]
    costs: list[float]
    best: float


def _padded(lists: list[list[Any]], value: float, dtype: torch.dtype) -> Tensor:
    return pad_sequence([torch.tensor(each, dtype=dtype) for each in lists], batch_first=True, padding_value=value)


def _unwrapped(model: Any) -> Any:
    """The model itself, which may be wrapped for several processes.

    Raises:
        ValueError: it is no encoder-decoder that writes word by word, or its softmax is adaptive.
    """
    while hasattr(model, "module"):
        model = model.module
    if not isinstance(model, FairseqEncoderDecoderModel) or isinstance(model, FairseqNATModel):
        raise ValueError(f"sequence_risk trains autoregressive encoder-decoders, and {type(model).__name__} is none")
    if getattr(model.decoder, "adaptive_softmax", None) is not None:  # whose probabilities fairseq changes in place
        raise ValueError("sequence_risk is for a model with a softmax of all words, and this one has an adaptive one")
    return model
