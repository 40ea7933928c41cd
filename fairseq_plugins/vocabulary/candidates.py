"""Vocabulary selection: the candidate words of a batch (Mi et al. 2016, arXiv 1605.03209; L'Hostis et al. 2016, arXiv
1610.00072; ConvS2S section 5.4).

V target words, S source words, at most K translations per source word.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq.criterions import register_criterion
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
)
from fairseq.data import Dictionary
from fairseq.logging import metrics
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask
from torch import Tensor

from fairseq_plugins.common.files import decoded
from fairseq_plugins.common.output_layer import candidate_output

logger = logging.getLogger(__name__)


class Candidates:
    """The tables that determine the candidate words of a batch.

    Candidates are the special symbols, frequent words, and the most probable translations of the source words.  Special
    symbols, such as padding and the end of the sentence, are the first symbols of the target dictionary.  Special
    symbols are also the first candidates, so a special symbol has the same index in the candidates and in the
    dictionary.  Symbols that a task appends to a dictionary count as words.

    Args:
        translations: translations of each source word, (S, K), padded with a word that is always a candidate.
        always: whether each target word is a candidate in every batch, (V,).
    """

    def __init__(self, translations: Tensor, always: Tensor) -> None:
        self.translations = translations
        self.always = always

    @classmethod
    def read(
        cls, folder: str | Path, source: Dictionary, target: Dictionary, per_word: int, frequent: int
    ) -> Candidates:
        """Read the files that ``fairseq-plugins lexicon`` writes; words outside the dictionaries are ignored.

        ``candidates.txt`` has lines ``source target probability`` with descending probabilities for each source word,
        and ``frequent.txt`` has lines ``target count`` with descending counts.
        """
        if per_word < 1:
            raise ValueError(f"--candidates-per-word must be at least 1, got {per_word}")
        if frequent < 0:
            raise ValueError(f"--frequent-candidates must be at least 0, got {frequent}")
        always = torch.zeros(len(target), dtype=torch.bool)
        always[: target.nspecial] = True
        always[_frequent(Path(folder) / "frequent.txt", target, frequent)] = True
        translations = _translations(Path(folder) / "candidates.txt", source, target, per_word)
        logger.info(
            f"{folder}: {int(always.sum())} words are always candidates, "
            f"{int(translations.ne(target.pad()).any(dim=1).sum())} of {len(source)} source words add more candidates"
        )
        return cls(translations, always)

    @classmethod
    def restore(cls, translations: object, always: object, source: Dictionary, target: Dictionary) -> Candidates:
        """Validate tables from a checkpoint, and return them as `Candidates`."""
        fault = None
        if not isinstance(always, Tensor) or always.dtype != torch.bool or always.shape != (len(target),):
            fault = f"`always` must be one boolean for each of {len(target)} target words"
        elif not always[: target.nspecial].all():
            fault = "`always` must include the special symbols"
        elif not isinstance(translations, Tensor) or translations.dtype not in (torch.int32, torch.int64):
            fault = "`translations` must be an integer tensor"
        elif translations.dim() != 2 or len(translations) != len(source):
            fault = f"`translations` must have one row for each of {len(source)} source words"
        elif not translations.ge(0).logical_and(translations.lt(len(target))).all():
            fault = f"`translations` must hold indices of target words, 0 to {len(target) - 1}"
        if fault is not None:
            raise ValueError(f"--candidates: in the checkpoint, {fault}; pass the folder that training used")
        return cls(translations, always)  # type: ignore[arg-type]

    def mask(self, src_tokens: Tensor) -> Tensor:
        """Return a mask, (V,), that is true for the candidates of the given source words.

        ``src_tokens`` may have any shape.
        """
        if self.always.device != src_tokens.device:
            # Assign `self.always` after `self.translations`: another thread that finds `self.always` on the new device
            # does not check the device of `self.translations`.
            self.translations = self.translations.to(src_tokens.device)
            self.always = self.always.to(src_tokens.device)
        translations = self.translations.index_select(0, src_tokens.flatten())
        return self.always.index_fill(0, translations.flatten().long(), True)

    def words(self, src_tokens: Tensor, *forced: Tensor | None) -> Tensor:
        """Return the candidates of a batch and all words in ``forced``, as ascending dictionary indices, (V,)."""
        mask = self.mask(src_tokens)
        for tokens in forced:
            if tokens is not None:
                mask.index_fill_(0, tokens.flatten().to(mask.device, torch.long), True)
        return mask.nonzero().squeeze(1)


def candidate_indices(tokens: Tensor, words: Tensor | None) -> Tensor:
    """Return each token's index in the sorted candidates ``words``, (V,), or the token itself if ``words`` is None.

    Each token must be a candidate.
    """
    return tokens if words is None else torch.searchsorted(words, tokens.to(words))


def _frequent(path: Path, target: Dictionary, count: int) -> list[int]:
    """Return the first ``count`` words of the file that are in the dictionary."""
    words: dict[int, None] = {}  # an ordered set
    for word, _ in _lines(path, "target count"):
        index = target.indices.get(word, 0)
        if len(words) < count and index >= target.nspecial:
            words[index] = None
    return list(words)


def _translations(path: Path, source: Dictionary, target: Dictionary, per_word: int) -> Tensor:
    """Return a padded table of translations, (S, K), with one row for each source word.

    A row has the first ``per_word`` translations that are in the target dictionary, in the order of the file.
    """
    found: list[dict[int, None]] = [{} for _ in range(len(source))]  # ordered sets
    sources, targets, specials = source.indices, target.indices, target.nspecial
    for source_word, target_word, _ in _lines(path, "source target probability"):
        row = sources.get(source_word, 0)
        if len(found[row]) < per_word and row >= source.nspecial:
            index = targets.get(target_word, 0)
            if index >= specials:
                found[row][index] = None
    if not any(found):
        raise ValueError(f"{path} has no line with a source and a target word of the dictionaries: check the languages")
    table = np.full((len(source), max(map(len, found))), target.pad(), dtype=np.int32)
    for row, words in enumerate(found):
        table[row, : len(words)] = list(words)
    return torch.from_numpy(table)


def _lines(path: Path, form: str) -> Iterator[list[str]]:
    """Yield the fields of each line; ``form`` has the names of the fields, for example ``"target count"``.

    The last field is a number.  If a file has no source words, this number must not increase from line to line.  If a
    file has source words, this number must not increase from line to line among the lines of one source word.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist: --candidates needs a folder made by `fairseq-plugins lexicon`")
    names, previous = form.split(), dict[str, float]()
    with path.open("rb") as file:
        for number, line in enumerate(decoded(file, path), 1):
            fields = line.split(" ")
            try:
                value = float(fields[-1])
            except ValueError:
                value = math.nan
            if len(fields) != len(names) or not math.isfinite(value):
                raise ValueError(
                    f"{path}, line {number}: expected `{form}`, got {line[:100]!r}; correct it, or run lexicon again"
                )
            word = fields[0] if len(names) > 2 else ""
            if value > previous.get(word, math.inf):
                raise ValueError(
                    f"{path}, line {number}: {line.strip()[:100]!r} follows a smaller {names[-1]}"
                    f"{f' of {word!r}' if word else ''}: sort lines by descending {names[-1]}"
                )
            previous[word] = value
            yield fields


@register_criterion("vocab_selection_cross_entropy", dataclass=LabelSmoothedCrossEntropyCriterionConfig)
class VocabSelectionCrossEntropy(LabelSmoothedCrossEntropyCriterion):
    """fairseq's label-smoothed cross-entropy over the candidates of each batch and the words of its references.

    The output layer computes only the logits of candidates and reference words, so only the weights of these words
    receive gradients.  Label smoothing distributes probability only among candidates and reference words.  Validation
    uses the same loss.  This loss is smaller than a loss over the whole vocabulary, so do not compare the two losses.

    The criterion logs two numbers.  ``candidates`` is the number of words in the output layer of a batch.  ``coverage``
    is the percentage of reference words, including ends of sentences, that are candidates of their batch.  Words that
    the output layer contains only because of a reference are not candidates.
    """

    forgets_logits = True

    @classmethod
    def build_criterion(cls, cfg: LabelSmoothedCrossEntropyCriterionConfig, task: FairseqTask) -> Any:
        """Build the criterion."""
        if getattr(task, "candidates", None) is None:
            raise ValueError(
                "--criterion vocab_selection_cross_entropy needs --task translation_fast with --candidates"
            )
        return super().build_criterion(cfg, task)

    def forward(self, model: BaseFairseqModel, sample: dict[str, Any], reduce: bool = True) -> Any:
        """Return loss, sample size and log.

        A synchronisation with the device is needed only for the number of candidates, which determines tensor sizes.
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
