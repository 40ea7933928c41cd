"""Scores of a model of ``own-data``, against text as it was given."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from fairseq_plugins.cli.generated import read_generated
from fairseq_plugins.cli.own_data.folder import Folder
from fairseq_plugins.cli.own_data.parallel_text import read_text

TOKENIZERS = ("13a", "intl", "zh", "char", "ja-mecab", "ko-mecab", "none")
# By language: sacreBLEU's tokenizer, and the module that it needs. Other languages put spaces between words.
BY_LANGUAGE: dict[str, tuple[str, str | None]] = {
    "zh": ("zh", None),
    "ja": ("ja-mecab", "MeCab"),
    "ko": ("ko-mecab", "mecab_ko"),
    **dict.fromkeys(("th", "lo", "km", "my", "bo"), ("char", None)),
}


def tokenizer_for(language: str) -> str:
    """Return sacreBLEU's tokenizer for text in a language; characters if the one for it is not installed."""
    name, module = BY_LANGUAGE.get(language.partition("-")[0], ("13a", None))
    return name if module is None or find_spec(module) is not None else "char"


@dataclass(frozen=True)
class Scored:
    """How well a model translates a part that was held out.

    Attributes:
        part: ``test`` or ``valid``.
        bleu: sacreBLEU's, of the text.
        chrf: likewise.
        signature: sacreBLEU's, of `bleu`.
        lines: source, reference and translation of each line that was translated.
        left_out: number of lines that are too long for the model.
    """

    part: str
    bleu: float
    chrf: float
    signature: str
    lines: list[tuple[str, str, str]]
    left_out: int

    def __str__(self) -> str:
        name = "validation" if self.part == "valid" else self.part
        text = f"{len(self.lines)} lines of the {name} part, on which it was not trained"
        text += f" ({self.left_out} are too long for the model and left out)" if self.left_out else ""
        return f"{text}:\nBLEU {self.bleu:.1f}, chrF {self.chrf:.1f} ({self.signature})"


def held_out_part(folder: Folder) -> str:
    """Return the part to score a model on: the test part, or else the validation part."""
    return "test" if "test" in folder.parts else "valid"


def score_held_out(folder: Folder, generated: Path) -> Scored:
    """Score what fairseq-generate has made of the held-out part against the untouched text.

    Raises:
        ValueError: the file holds no translations, or of another text.
        OSError: there is no such file.
    """
    part = held_out_part(folder)
    sentences = read_generated([generated])
    pairs = list(zip(*(read_text(path, "") for path in folder.text(part)), strict=True))
    if sentences[-1].number >= len(pairs):
        raise ValueError(f"{generated} has more lines than {folder.text(part)[0]}: it is of another text")
    lines = [(*pairs[sentence.number], sentence.hypotheses[0].text) for sentence in sentences]
    hypotheses, references = [line[2] for line in lines], [line[1] for line in lines]
    metric = BLEU(tokenize=tokenizer_for(folder.languages[1]))
    bleu = metric.corpus_score(hypotheses, [references]).score
    chrf = CHRF().corpus_score(hypotheses, [references]).score
    return Scored(part, bleu, chrf, f"sacreBLEU {metric.get_signature()}", lines, len(pairs) - len(lines))
