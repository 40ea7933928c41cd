"""Validation by BLEU and chrF: text of the translations, and numbers of n-grams that sum over batches and processes."""

from __future__ import annotations

import json
import logging
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from fairseq import utils
from fairseq.data import Dictionary, encoders
from fairseq.logging import metrics
from fairseq.registry import REGISTRIES
from fairseq.tasks.translation import TranslationConfig
from sacrebleu import BLEU, CHRF
from torch import Tensor

from fairseq_plugins.common.text import tokenizer_for

logger = logging.getLogger(__name__)


class TextScorer:
    """Count the n-grams that translations share with their references, for fairseq's ``--eval-bleu``.

    ``--eval-bleu-detok`` may also be a name of ``--bpe``.  With ``sentencepiece``, its model turns pieces into text.
    """

    def __init__(self, cfg: TranslationConfig, dictionary: Dictionary) -> None:
        self.cfg, self.dictionary = cfg, dictionary
        kind = "bpe" if cfg.eval_bleu_detok in REGISTRIES["bpe"]["registry"] else "tokenizer"
        build = encoders.build_bpe if kind == "bpe" else encoders.build_tokenizer
        self.decoder = build(Namespace(**{kind: cfg.eval_bleu_detok}, **json.loads(cfg.eval_bleu_detok_args)))
        self.search = Namespace(**json.loads(cfg.eval_bleu_args))
        self.bleu = BLEU(tokenize="none" if cfg.eval_tokenized_bleu else tokenizer_for(cfg.target_lang), force=True)

    def text(self, tokens: Tensor, unknown: str) -> str:
        """Return the text of tokens, in which ``unknown`` replaces unknown words."""
        words = self.dictionary.string(tokens.int().cpu(), self.cfg.eval_bleu_remove_bpe, unk_string=unknown)
        return str(self.decoder.decode(words))

    def count(self, translations: Iterable[Tensor], targets: Tensor) -> dict[str, float]:
        """Return the numbers of n-grams of a batch, by the names of fairseq's logs."""
        found = [self.text(tokens, "UNKNOWNTOKENINHYP") for tokens in translations]
        without_padding = (utils.strip_pad(tokens, self.dictionary.pad()) for tokens in targets)
        references = [self.text(tokens, "UNKNOWNTOKENINREF") for tokens in without_padding]
        if self.cfg.eval_bleu_print_samples:
            logger.info(f"example hypothesis: {found[0]}")
            logger.info(f"example reference: {references[0]}")
        bleu = self.bleu.corpus_score(found, [references])
        counts = {"_bleu_sys_len": bleu.sys_len, "_bleu_ref_len": bleu.ref_len}
        for order, (count, total) in enumerate(zip(bleu.counts, bleu.totals, strict=True)):
            counts |= {f"_bleu_counts_{order}": count, f"_bleu_totals_{order}": total}
        # sacreBLEU has no public function for chrF's numbers of n-grams.
        chrf = np.sum(CHRF()._extract_corpus_statistics(found, [references]), axis=0)
        return counts | {f"_chrf_{place}": float(number) for place, number in enumerate(chrf)}


def log_chrf(logs: Sequence[Mapping[str, Any]]) -> None:
    """Log chrF if the logs of a validation contain its numbers of n-grams; fairseq logs BLEU."""
    scorer = CHRF()
    total = np.array([float(sum(log.get(f"_chrf_{place}", 0) for log in logs)) for place in range(3 * scorer.order)])
    if total.any():
        metrics.log_scalar("_chrf", total)
        metrics.log_derived(
            "chrf", lambda meters: round(scorer._compute_score_from_stats(meters["_chrf"].sum.tolist()).score, 2)
        )
