"""Reversible sentencepiece subwords.

Text is not normalised, and spaces are kept.  Characters without a piece become UTF-8 bytes, so no character is unknown.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import sentencepiece

from fairseq_plugins.cli.bar import bar
from fairseq_plugins.cli.own_data.parallel_text import Line, writing
from fairseq_plugins.common.files import replacing

SAMPLE = 1_000_000  # lines to learn from
# Limit of the characters in distinct words that subwords are learned from; each takes about 130 bytes of memory.
DISTINCT = 8_000_000
COVERAGE = 0.9995  # share of the text's characters that get a piece; rarer characters become bytes
SPECIAL = ("<unk>", "<s>", "</s>", "<pad>")  # fairseq's special symbols; text is never segmented into them
OTHER_SPACE = re.compile(r"[^\S ]+")  # fairseq would split a piece at any whitespace
# sentencepiece writes a space as U+2581. To keep decoding unambiguous, a U+2581 in the text becomes two Unicode
# noncharacters; the first of these noncharacters, if it is in the text, also becomes two.
ESCAPES = {"2581": "FDD0 FDD1", "FDD0": "FDD0 FDD2"}
BLOCK = 10_000  # lines per call of sentencepiece


def learn(paths: Sequence[Path], lines: int, merges: int, output: Path) -> None:
    """Learn one BPE from all files (Sennrich et al. 2016, sentencepiece's ``bpe``).

    Args:
        paths: text, one sentence per line.
        lines: total number of lines.  Only every n-th line is used if there are more than `SAMPLE` lines, or if
            distinct words have more than `DISTINCT` characters, as happens in languages without spaces.
        merges: number of pieces in addition to characters and bytes.
        output: file of the sentencepiece model.

    Raises:
        ValueError: the text has no pair of characters to merge.
    """
    every = -(-lines // SAMPLE)
    characters: Counter[str] = Counter()
    words: set[int] = set()
    distinct = 0
    for line in _sample(paths, every):
        characters.update(line)
        for word in line.split():
            if (key := hash(word)) not in words:
                words.add(key)
                distinct += len(word)
    del words
    every *= max(1, -(-distinct // DISTINCT))
    left, covered = COVERAGE * characters.total(), 0
    for _, count in characters.most_common():
        if left <= 0:
            break
        left, covered = left - count, covered + 1
    with TemporaryDirectory() as folder, replacing(output) as unfinished:
        escape, unescape = Path(folder, "escape"), Path(folder, "unescape")
        escape.write_text("".join(f"{text}\t{escaped}\n" for text, escaped in ESCAPES.items()))
        unescape.write_text("".join(f"{escaped}\t{text}\n" for text, escaped in ESCAPES.items()))
        lines_read = bar(_sample(paths, every), desc="learn subwords", unit=" lines")
        parts = (part for line in lines_read for part in OTHER_SPACE.split(line) if part.strip())
        with unfinished.open("wb") as file:
            try:
                sentencepiece.SentencePieceTrainer.train(
                    sentence_iterator=parts,
                    model_writer=file,
                    model_type="bpe",
                    vocab_size=len(SPECIAL) + 256 + covered + merges,
                    hard_vocab_limit=False,
                    character_coverage=COVERAGE,
                    byte_fallback=True,
                    split_digits=True,
                    remove_extra_whitespaces=False,
                    normalization_rule_tsv=str(escape),
                    denormalization_rule_tsv=str(unescape),
                    unk_id=0,
                    bos_id=1,
                    eos_id=2,
                    pad_id=3,
                    minloglevel=2,
                )
            except RuntimeError as error:
                names = " and ".join(map(str, paths))
                raise ValueError(
                    f"{names}: cannot learn subwords, give more text: {str(error).splitlines()[0]}"
                ) from error


def _sample(paths: Sequence[Path], every: int) -> Iterator[str]:
    for path in paths:
        with path.open(encoding="utf-8", newline="\n") as file:
            yield from (line.rstrip("\n") for line in islice(file, 0, None, every))


def write_dictionary(model: Path, output: Path) -> None:
    """Write the pieces of a model as a fairseq dictionary, except the special symbols, which fairseq adds itself."""
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(model))
    with writing(output) as file:
        file.writelines(f"{pieces.id_to_piece(n)} 1\n" for n in range(len(SPECIAL), pieces.get_piece_size()))


def segmenter(model: Path) -> Line:
    """Return a function that splits a line of text into pieces, separated by spaces."""
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(model))
    return lambda line: " ".join(pieces.encode(line, out_type=str))


def segment(model: Path, path: Path, output: Path) -> None:
    """Write the pieces of each line of a file, separated by spaces."""
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(model))
    with path.open(encoding="utf-8", newline="\n") as lines, writing(output) as file:
        stripped = (line.rstrip("\n") for line in bar(lines, desc=f"segment {output.name}", unit=" lines"))
        while block := list(islice(stripped, BLOCK)):
            file.writelines(f"{' '.join(line)}\n" for line in pieces.encode(block, out_type=str))
