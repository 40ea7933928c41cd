"""Where to look for what an unknown word stands for: the offsets compared."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence

from fairseq.data import Dictionary
from fairseq.tokenizer import tokenize_line
from sacrebleu.metrics.bleu import BLEU

from fairseq_plugins.tools.generated import Sentence, lines_of, read_generated
from fairseq_plugins.unknown_words import place_beside, read_translations

__all__ = ["compare", "count_right"]

_UNKNOWN = Dictionary().unk_string()


def compare(args: Namespace) -> None:
    """Print the figures of each offset that the arguments of `fairseq-plugins tune-offset` name, and the best one.

    Raises:
        ValueError: the translations or texts cannot be read, do not fit together, or leave nothing to replace.
    """
    sentences = read_generated(args.generated)
    sources, references = (
        [tokenize_line(line) for line in lines_of(path, sentences)] for path in (args.source, args.reference)
    )
    translations = read_translations(args.dictionary) or {}
    unknown = sum(translation(sentence).count(_UNKNOWN) for sentence in sentences)
    if not unknown:
        raise ValueError("there is no unknown word in the translations")
    metric = BLEU(tokenize="none", references=[[" ".join(words) for words in references]], force=True)
    right = {}
    print("offset  right          BLEU")
    for offset in args.offsets:
        replaced = [
            replace(sentence, source, offset, translations) for sentence, source in zip(sentences, sources, strict=True)
        ]
        right[offset] = sum(map(count_right, map(translation, sentences), replaced, references))
        bleu = metric.corpus_score(list(map(" ".join, replaced)), None).score
        print(f"{offset:+6d}  {right[offset]:5d} {right[offset] / unknown:7.1%}  {bleu:5.2f}")
    best = min(right, key=lambda offset: (-right[offset], abs(offset)))
    print(f"best for {unknown} unknown words in {len(sentences)} sentences: --attention-offset {best}")


def translation(sentence: Sentence) -> list[str]:
    """The words of its best hypothesis."""
    return tokenize_line(sentence.hypotheses[0].words)


def replace(sentence: Sentence, source: Sequence[str], offset: int, translations: Mapping[str, str]) -> list[str]:
    """The translation with its unknown words replaced, as `replace_unknown_words` does it.

    Raises:
        ValueError: its alignment is not there, or not one of these words.
    """
    words, alignment = translation(sentence), sentence.hypotheses[0].alignment
    if alignment is None:
        raise ValueError(
            f"sentence {sentence.number} has no alignment of words (A- line): fairseq-generate --print-alignment hard"
        )
    if not source:  # then there is no alignment, and no word to copy
        return words
    if len(alignment) != len(words) or max(alignment, default=-1) >= len(source):
        raise ValueError(
            f"the alignment of sentence {sentence.number} is not one of its {len(source)} source and {len(words)} "
            "target words: the text is to be as the model reads it, and translated without --remove-bpe"
        )
    copied = [source[place_beside(position, offset, len(source))] for position in alignment]
    return [
        translations.get(copy, copy) if word == _UNKNOWN else word for word, copy in zip(words, copied, strict=True)
    ]


def count_right(before: Sequence[str], after: Sequence[str], reference: Sequence[str]) -> int:
    """How many unknown words became one of the reference's that the translation did not have yet."""
    found = Counter(new for old, new in zip(before, after, strict=True) if old == _UNKNOWN)
    missing = Counter(reference) - Counter(before)
    return (found & missing).total()
