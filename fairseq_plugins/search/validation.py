"""Validation by BLEU and chrF, from n-gram counts that are summed over batches and processes."""

from __future__ import annotations

import json
import logging
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from fairseq import utils
from fairseq.data import Dictionary, encoders
from fairseq.logging import metrics
from fairseq.registry import REGISTRIES
from fairseq.tasks.translation import TranslationConfig
from sacrebleu import BLEU, CHRF
from sacrebleu.metrics.base import Metric
from torch import Tensor

from fairseq_plugins.common.text import UNKNOWN_IN_HYPOTHESIS, UNKNOWN_IN_REFERENCE, tokenizer_for

logger = logging.getLogger(__name__)

METRICS: dict[str, Metric] = {"bleu": BLEU(), "chrf": CHRF()}
# Replaces unknown words until the text is detokenised.  fairseq's bytes and byte_bpe decode only some characters.
UNKNOWN = "UNKNOWNWORD"


class TextScorer:
    """Count the n-grams that translations share with their references, for fairseq's ``--eval-bleu``.

    ``--eval-bleu-detok`` also accepts the values of ``--bpe``; for example, ``sentencepiece`` turns pieces into text.
    """

    def __init__(self, cfg: TranslationConfig, dictionary: Dictionary) -> None:
        self.cfg, self.dictionary = cfg, dictionary
        kind = "bpe" if cfg.eval_bleu_detok in REGISTRIES["bpe"]["registry"] else "tokenizer"
        build = encoders.build_bpe if kind == "bpe" else encoders.build_tokenizer
        self.decoder = build(Namespace(**{kind: cfg.eval_bleu_detok}, **json.loads(cfg.eval_bleu_detok_args)))
        self.search = Namespace(**json.loads(cfg.eval_bleu_args))
        tokenizer = "none" if cfg.eval_tokenized_bleu else tokenizer_for(cfg.target_lang)
        self.metrics = METRICS | {"bleu": BLEU(tokenize=tokenizer, force=True)}

    def text(self, tokens: Tensor) -> str:
        """Convert tokens to text; `UNKNOWN` replaces each unknown word."""
        words = self.dictionary.string(tokens.int().cpu(), self.cfg.eval_bleu_remove_bpe, unk_string=UNKNOWN)
        return str(self.decoder.decode(words))

    def count(self, translations: Iterable[Tensor], targets: Tensor) -> dict[str, float]:
        """Return the n-gram counts of a batch; the keys are the names of the counts in fairseq's logs."""
        found = [self.text(tokens) for tokens in translations]
        without_padding = (utils.strip_pad(tokens, self.dictionary.pad()) for tokens in targets)
        references = [self.text(tokens) for tokens in without_padding]
        if self.cfg.eval_bleu_print_samples:
            logger.info(f"example hypothesis: {found[0]}")
            logger.info(f"example reference: {references[0]}")
        found = [text.replace(UNKNOWN, UNKNOWN_IN_HYPOTHESIS) for text in found]
        references = [text.replace(UNKNOWN, UNKNOWN_IN_REFERENCE) for text in references]
        counts: dict[str, float] = {}
        for name, metric in self.metrics.items():
            # sacreBLEU has no public function for n-gram counts.
            sums = np.sum(metric._extract_corpus_statistics(found, [references]), axis=0)
            counts |= {f"_{name}_{place}": float(number) for place, number in enumerate(sums)}
        return counts


def log_scores(logs: Sequence[Mapping[str, Any]]) -> None:
    """Log the scores of a validation's translations if its logs contain n-gram counts."""
    for name, metric in METRICS.items():
        size = len({key for log in logs for key in log if key.startswith(f"_{name}_")})
        if size:
            sums = np.array([sum(log.get(f"_{name}_{place}", 0) for log in logs) for place in range(size)])
            metrics.log_scalar(f"_{name}", sums)
            metrics.log_derived(name, partial(score, metric, f"_{name}"))


def score(metric: Metric, name: str, meters: Mapping[str, Any]) -> float:
    """Return a score from n-gram counts, which a meter sums over batches."""
    return round(float(metric._compute_score_from_stats(meters[name].sum.tolist()).score), 2)
