"""Replacement of unknown words by attention (Jean et al. 2015, arXiv 1412.2007; ConvS2S section 4.3).

Each ``<unk>`` is replaced by the translation of the source word with the largest attention, or by a copy of this word.
Some models attend to a word at a fixed distance from the aligned word; an offset corrects this distance (Gehring et al.
2016, section 4.4).  `repairs` replaces fairseq's implementation by the functions of this module.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.tokenizer import tokenize_line
from torch import Tensor

from fairseq_plugins.common.files import decoded

MAX_SHOWN = 100  # maximum number of characters of a line in an error message


class SourceWords(list[Any]):
    """fairseq's alignment of a hypothesis, and in addition the aligned source word of each target token.

    Args:
        printed: the alignment that fairseq prints; empty without ``--print-alignment``.
        attention: attention of the hypothesis, a tensor of shape (source tokens, target tokens).
        is_word: a mask of shape (source tokens,), true for each source token that is a word.
        offset: position of the aligned source word, minus the position of the source word with the largest attention.
    """

    def __init__(self, printed: Any, attention: Tensor, is_word: Tensor, offset: int = 0) -> None:
        super().__init__(printed)
        if not attention.numel():
            raise ValueError(
                "--replace-unk needs attention to the source, and this model reports none: use another model"
            )
        words = is_word.nonzero().squeeze(1)
        self.length = len(words)
        attended = attention[words].argmax(dim=0).tolist() if self.length else []
        self.positions = [shift_position(position, offset, self.length) for position in attended]


def shift_position(position: int, offset: int, length: int) -> int:
    """Return the position plus the offset, clipped to 0, ..., length - 1."""
    return min(max(position + offset, 0), length - 1)


def keep_source_words(task: Any, generator: Any, offset: int = 0) -> None:
    """Replace methods of ``generator`` and ``task``, so that unknown source words can be copied to translations.

    The generator returns a `SourceWords` as alignment of each hypothesis.  For ``fairseq-interactive``, the task adds
    the unknown source words of a buffer of lines to the dictionary, and removes these words before it reads the next
    buffer.  The model still reads unknown source words as ``<unk>``.  Padding, ends of sentences, and text that is
    spelled like these symbols do not count as words.
    """
    dictionary = task.source_dictionary
    size, generate, tokenize = len(dictionary), generator.generate, task.get_interactive_tokens_and_lengths
    specials = torch.tensor([dictionary.bos(), dictionary.pad(), dictionary.eos()])

    def generate_and_align(models: Any, sample: dict[str, Any], **options: Any) -> Any:
        source = sample["net_input"]["src_tokens"]
        source = source.masked_fill(source.ge(size), dictionary.unk())
        net_input = {**sample["net_input"], "src_tokens": source}
        found = generate(models, {**sample, "net_input": net_input}, **options)
        are_words = torch.isin(source, specials.to(source.device), invert=True)
        for is_word, hypotheses in zip(are_words, found, strict=True):
            for hypo in hypotheses:
                hypo["alignment"] = SourceWords(hypo["alignment"], hypo["attention"], is_word, offset)
        return found

    def learn_and_tokenize(lines: list[str], encode: Callable[[str], str]) -> Any:
        for word in dictionary.symbols[size:]:
            del dictionary.indices[word]
        del dictionary.symbols[size:], dictionary.count[size:]
        encoded = [encode(line) for line in lines]
        for line in encoded:
            dictionary.encode_line(line, add_if_not_exist=True)
        return tokenize(encoded, lambda line: line)

    generator.generate = generate_and_align
    task.get_interactive_tokens_and_lengths = learn_and_tokenize


def replace_unknown_words(
    tokens: Tensor, text: str, alignment: Any, source: str, translations: dict[str, str], dictionary: Dictionary
) -> str:
    """Return the text of a hypothesis after replacing its unknown words.

    ``tokens``, ``text`` and ``alignment`` belong to the hypothesis, and ``alignment`` must be a `SourceWords`.  Source
    words without translation are copied.
    """
    if not isinstance(alignment, SourceWords):
        raise ValueError(
            "--replace-unk needs attention to the source, and this generator reports none: use another search"
        )
    specials = (dictionary.bos_word, dictionary.pad_word, dictionary.eos_word)
    words = [word for word in tokenize_line(source) if word not in specials]
    if len(words) != alignment.length:
        raise ValueError(
            f"--replace-unk: {source[:MAX_SHOWN]!r} has {len(words)} words, and the model read {alignment.length}; "
            "give text that is already segmented like the training text, and omit --bpe and --tokenizer"
        )
    if not words:
        return text
    unknown = tokens.eq(dictionary.unk()).nonzero().flatten().tolist()
    aligned = (words[alignment.positions[place]] for place in unknown)
    return " ".join(
        translations.get(copied := next(aligned), copied) if word == dictionary.unk_string() else word
        for word in tokenize_line(text)
    )


def read_translations(replace_unk: str | None) -> dict[str, str] | None:
    """Read the translations of ``--replace-unk`` from a file with lines ``source target``; an empty path gives {}."""
    if replace_unk is None:
        return None
    if replace_unk.strip() in ("", "@@"):  # fairseq's parser returns @@ for --replace-unk without a value
        return {}
    translations = {}
    path = Path(replace_unk)
    with path.open("rb") as file:
        for number, text in enumerate(decoded(file, path), start=1):
            words = text.split()
            if len(words) != 2:
                found = text.strip()[:MAX_SHOWN]
                raise ValueError(
                    f"{replace_unk}, line {number}: expected 'source target', got {found!r}; write two words"
                )
            translations[words[0]] = words[1]
    return translations
