"""Unknown words of a translation, replaced by attention (Jean et al. 2015, arXiv 1412.2007; ConvS2S section 4.3).

Each ``<unk>`` becomes what a dictionary has for the source word that it attends to most, or else a copy of that word.
Attention that is always some words beside the right one is moved by an offset (Gehring et al. 2016, section 4.4).
`repairs` puts this in the place of fairseq's own.
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

LONGEST_SHOWN = 100  # characters of a line in an error


class SourceWords(list[Any]):
    """A hypothesis's alignment as fairseq prints it, and the source word that each target token attends to most.

    Args:
        printed: fairseq's alignment; empty where nobody has asked for one.
        attention: (source tokens, target tokens).
        is_word: which of the source tokens are words, (source tokens).
        offset: how many words behind the most attended one to look.

    Raises:
        ValueError: there is no attention.
    """

    def __init__(self, printed: Any, attention: Tensor, is_word: Tensor, offset: int = 0) -> None:
        super().__init__(printed)
        if not attention.numel():
            raise ValueError("--replace-unk needs the attention to the source, and the model reports none")
        words = is_word.nonzero().squeeze(1)
        self.length = len(words)
        attended = attention[words].argmax(dim=0).tolist() if self.length else []
        self.positions = [place_beside(position, offset, self.length) for position in attended]


def place_beside(position: int, offset: int, length: int) -> int:
    """The word so many words behind another, or the sentence's first or last one where there is none."""
    return min(max(position + offset, 0), length - 1)


def keep_source_words(task: Any, generator: Any, offset: int = 0) -> None:
    """Make ``generator`` align with `SourceWords`, and ``task`` keep the words that ``fairseq-interactive`` is given.

    The source dictionary learns those of a buffer that it does not know, until the next comes; models still read them
    as unknown.  Padding and the ends of a sentence are no words, and neither is text that is written like them.
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
    """Replace each unknown word of a hypothesis.

    Args:
        tokens: the hypothesis, (target tokens).
        text: its words.
        alignment: its `SourceWords`.
        source: the source sentence.
        translations: of source words; those without one are copied.
        dictionary: target words.

    Raises:
        ValueError: the generator has made no such alignment, or it is not one of this source's words.
    """
    if not isinstance(alignment, SourceWords):
        raise ValueError("--replace-unk needs the attention to the source, and this generator reports none")
    specials = (dictionary.bos_word, dictionary.pad_word, dictionary.eos_word)
    words = [word for word in tokenize_line(source) if word not in specials]
    if len(words) != alignment.length:
        raise ValueError(
            f"--replace-unk needs the source as the model reads it, in {alignment.length} words, without --bpe or "
            f"--tokenizer; this has {len(words)}: {source[:LONGEST_SHOWN]}"
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
    """Read what ``--replace-unk`` was given: a file of lines ``source target``, or nothing, which copies all words.

    Raises:
        ValueError: a line is not two words, or not UTF-8.
        OSError: the file cannot be read.
    """
    if replace_unk is None:
        return None
    if replace_unk.strip() in ("", "@@"):  # fairseq's parser makes the latter of the option alone
        return {}
    translations = {}
    path = Path(replace_unk)
    with path.open("rb") as file:
        for number, text in enumerate(decoded(file, path), start=1):
            words = text.split()
            if len(words) != 2:
                found = text.strip()[:LONGEST_SHOWN]
                raise ValueError(f"{replace_unk}, line {number}: expected 'source target', found {found!r}")
            translations[words[0]] = words[1]
    return translations
