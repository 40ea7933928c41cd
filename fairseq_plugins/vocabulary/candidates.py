"""Vocabulary selection: the few target words that a batch may need (Mi et al. 2016, arXiv 1605.03209; L'Hostis et al.
2016, arXiv 1610.00072; ConvS2S section 5.4).

V target words, S source words, K translations at most kept for each.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from fairseq.data import Dictionary
from torch import Tensor

from fairseq_plugins.common.files import decoded

logger = logging.getLogger(__name__)


class Candidates:
    """The candidates of a batch: special symbols, frequent words, and the likeliest translations of its source words.

    Special symbols are those at the start of the target dictionary (padding, end of sentence, ...).  They come first in
    the candidates too, so that they have the same numbers among them.  Symbols that a task adds at the end of a
    dictionary are words like others.

    Args:
        translations: for each source word its target words, filled up with any that is always a candidate, (S, K).
        always: which target words are candidates of every batch, (V,).
    """

    def __init__(self, translations: Tensor, always: Tensor) -> None:
        self.translations = translations
        self.always = always

    @classmethod
    def read(
        cls, folder: str | Path, source: Dictionary, target: Dictionary, per_word: int, frequent: int
    ) -> Candidates:
        """Read the files that ``fairseq-plugins lexicon`` has written.

        Words that the dictionaries do not know are passed over.

        Args:
            folder: holds ``candidates.txt``, lines ``source target probability``, the most probable first for each
                source word, and ``frequent.txt``, lines ``target count``, the most frequent first.
            source: source words.
            target: target words.
            per_word: K.
            frequent: how many of the frequent words are candidates of every batch.

        Raises:
            ValueError: a file is missing or malformed or knows no word of the dictionaries, an option is out of range,
                or the target dictionary does not begin with its special symbols.
        """
        if per_word < 1 or frequent < 0:
            raise ValueError(
                "--candidates-per-word must be positive and --frequent-candidates not negative, "
                f"but they are {per_word} and {frequent}"
            )
        if max(target.bos(), target.pad(), target.eos(), target.unk()) >= target.nspecial:
            raise ValueError("candidates need a target dictionary that begins with its special symbols")
        always = torch.zeros(len(target), dtype=torch.bool)
        always[: target.nspecial] = True
        always[_frequent(Path(folder) / "frequent.txt", target, frequent)] = True
        translations = _translations(Path(folder) / "candidates.txt", source, target, per_word)
        logger.info(
            f"{folder}: {int(always.sum())} words are always candidates, "
            f"{int(translations.ne(target.pad()).any(dim=1).sum())} of {len(source)} source words bring others"
        )
        return cls(translations, always)

    @classmethod
    def restore(cls, translations: object, always: object, source: Dictionary, target: Dictionary) -> Candidates:
        """Take the tables out of a checkpoint.

        Raises:
            ValueError: they are not tables of these dictionaries.
        """
        fault = None
        if not isinstance(always, Tensor) or always.dtype != torch.bool or always.shape != (len(target),):
            fault = f"`always` must hold a boolean for each of {len(target)} target words"
        elif not always[: target.nspecial].all():
            fault = "`always` must hold the special symbols"
        elif not isinstance(translations, Tensor) or translations.dtype not in (torch.int32, torch.int64):
            fault = "`translations` must be a tensor of int32"
        elif translations.dim() != 2 or len(translations) != len(source):
            fault = f"`translations` must have a row for each of {len(source)} source words"
        elif not translations.ge(0).logical_and(translations.lt(len(target))).all():
            fault = f"`translations` must hold numbers of target words, from 0 to {len(target) - 1}"
        if fault is not None:
            raise ValueError(f"--candidates of the checkpoint: {fault}; give the folder that training read")
        return cls(translations, always)  # type: ignore[arg-type]

    def mask(self, src_tokens: Tensor) -> Tensor:
        """Which target words are candidates of a batch of source words of any shape: (V,), new at each call."""
        if self.always.device != src_tokens.device:
            # What is asked for above comes last: another thread may ask meanwhile.
            self.translations = self.translations.to(src_tokens.device)
            self.always = self.always.to(src_tokens.device)
        translations = self.translations.index_select(0, src_tokens.flatten())
        return self.always.index_fill(0, translations.flatten().long(), True)

    def words(self, src_tokens: Tensor, *forced: Tensor | None) -> Tensor:
        """The candidates of a batch and words that must be among them, (V,), in the dictionary's order."""
        mask = self.mask(src_tokens)
        for tokens in forced:
            if tokens is not None:
                mask.index_fill_(0, tokens.flatten().to(mask.device, torch.long), True)
        return mask.nonzero().squeeze(1)


def numbers_among(tokens: Tensor, words: Tensor | None) -> Tensor:
    """Their numbers among the candidates, (V,), of which they are, if there are any."""
    return tokens if words is None else torch.searchsorted(words, tokens.to(words))


def _frequent(path: Path, target: Dictionary, wanted: int) -> list[int]:
    """The first ``wanted`` words of the file that the dictionary knows."""
    words: dict[int, None] = {}  # a set in order
    for word, _ in _lines(path, "target count"):
        index = target.indices.get(word, 0)
        if len(words) < wanted and index >= target.nspecial:
            words[index] = None
    return list(words)


def _translations(path: Path, source: Dictionary, target: Dictionary, per_word: int) -> Tensor:
    """The first target words that the dictionary knows for each source word, filled up with padding.

    Returns:
        (S, the most that a source word has): the option may ask for far more than there are.
    """
    found: list[dict[int, None]] = [{} for _ in range(len(source))]  # sets in order
    sources, targets, specials = source.indices, target.indices, target.nspecial
    for source_word, target_word, _ in _lines(path, "source target probability"):
        row = sources.get(source_word, 0)
        if len(found[row]) < per_word and row >= source.nspecial:
            index = targets.get(target_word, 0)
            if index >= specials:
                found[row][index] = None
    if not any(found):
        raise ValueError(f"{path} has no translation from and to words of the dictionaries: is it of other languages?")
    table = np.full((len(source), max(map(len, found))), target.pad(), dtype=np.int32)
    for row, words in enumerate(found):
        table[row, : len(words)] = list(words)
    return torch.from_numpy(table)


def _lines(path: Path, form: str) -> Iterator[list[str]]:
    """The fields of each line; ``form`` names them, and the last is a number, of each source word the largest first."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist: --candidates wants a folder made by `fairseq-plugins lexicon`")
    names, before = form.split(), dict[str, float]()
    with path.open("rb") as file:
        for number, line in enumerate(decoded(file, path), 1):
            fields = line.split(" ")
            try:
                value = float(fields[-1])
            except ValueError:
                value = math.nan
            if len(fields) != len(names) or not math.isfinite(value):
                raise ValueError(f"{path}, line {number}: expected `{form}`, found {line[:100]!r}")
            word = fields[0] if len(names) > 2 else ""
            if value > before.get(word, math.inf):
                raise ValueError(
                    f"{path}, line {number}: {line.strip()[:100]!r} stands behind a smaller {names[-1]}"
                    f"{f' of {word!r}' if word else ''}; the largest must come first"
                )
            before[word] = value
            yield fields
