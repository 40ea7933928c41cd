"""Unknown words of a translation, replaced by attention (Jean et al. 2015, arXiv 1412.2007; ConvS2S section 4.3).

Each ``<unk>`` becomes what a dictionary has for the source word that it attends to most, or else a copy of that word.
`compat` puts this in the place of fairseq's own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fairseq.data import Dictionary
from fairseq.tokenizer import tokenize_line
from torch import Tensor

__all__ = ["SourceWords", "keep_source_words", "read_translations", "replace_unknown_words"]


class SourceWords(list[Any]):
    """A hypothesis's alignment as fairseq prints it, and the source word that each target token attends to most.

    The end of the source is not a word.

    Args:
        printed: fairseq's alignment; empty where nobody has asked for one.
        attention: (source tokens, target tokens).
        source: the source tokens, with the end of the sentence and any padding, (source tokens).
        pad: the token that pads.

    Raises:
        ValueError: there is no attention.
    """

    def __init__(self, printed: Any, attention: Tensor, source: Tensor, pad: int) -> None:
        super().__init__(printed)
        if not attention.numel():
            raise ValueError("--replace-unk needs the attention to the source, and the model reports none")
        words = source.ne(pad).nonzero().squeeze(1)[:-1]
        self.length = len(words)
        self.positions: list[int] = attention[words].argmax(dim=0).tolist() if self.length else []


def keep_source_words(task: Any, generator: Any) -> None:
    """Make ``generator`` align with `SourceWords`, and ``task`` keep the words that ``fairseq-interactive`` is given.

    The source dictionary learns the words that it does not know; models still read them as unknown.
    """
    dictionary = task.source_dictionary
    size, generate, tokenize = len(dictionary), generator.generate, task.get_interactive_tokens_and_lengths

    def generate_and_align(models: Any, sample: dict[str, Any], **options: Any) -> Any:
        source = sample["net_input"]["src_tokens"]
        source = source.masked_fill(source.ge(size), dictionary.unk())
        net_input = {**sample["net_input"], "src_tokens": source}
        found = generate(models, {**sample, "net_input": net_input}, **options)
        for sentence, hypotheses in zip(source, found, strict=True):
            for hypo in hypotheses:
                hypo["alignment"] = SourceWords(hypo["alignment"], hypo["attention"], sentence, dictionary.pad())
        return found

    def learn_and_tokenize(lines: list[str], encode: Callable[[str], str]) -> Any:
        for line in lines:
            dictionary.encode_line(encode(line), add_if_not_exist=True)
        return tokenize(lines, encode)

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
    words = tokenize_line(source)
    if len(words) != alignment.length:
        raise ValueError(
            f"--replace-unk needs the source as the model reads it, in {alignment.length} words, without --bpe or "
            f"--tokenizer; this has {len(words)}: {source}"
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
        ValueError: a line is not two words.
        OSError: the file cannot be read.
    """
    if replace_unk is None:
        return None
    if replace_unk.strip() in ("", "@@"):  # fairseq's parser makes the latter of the option alone
        return {}
    translations = {}
    with Path(replace_unk).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            words = line.split()
            if len(words) != 2:
                raise ValueError(f"{replace_unk}, line {number}: expected 'source target', found {line.strip()!r}")
            translations[words[0]] = words[1]
    return translations
