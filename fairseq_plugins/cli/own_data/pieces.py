"""Subwords of sentencepiece that give every line of text back unchanged.

Text is not normalised and its spaces are kept.  A character without a piece of its own becomes the bytes of its UTF-8,
so no text has unknown words.
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
DISTINCT = 8_000_000  # characters of different words to learn from, each of some 130 bytes of memory
COVERAGE = 0.9995  # of the characters of the text; rarer ones are written in bytes
SPECIAL = ("<unk>", "<s>", "</s>", "<pad>")  # fairseq's; no text is one of them
OTHER_SPACE = re.compile(r"[^\S ]+")  # white space, at which fairseq would take a piece apart, but for the space
# sentencepiece writes a space as U+2581. A U+2581 of the text is written as two noncharacters of Unicode; so is the
# first of these, that every text comes back.
ESCAPES = {"2581": "FDD0 FDD1", "FDD0": "FDD0 FDD2"}
BLOCK = 10_000  # lines that are segmented together


def learn(paths: Sequence[Path], lines: int, merges: int, output: Path) -> None:
    """Learn one byte pair encoding of all files (Sennrich et al. 2016, as sentencepiece's ``bpe``).

    Args:
        paths: text, a sentence a line.
        lines: of all files together; every n-th is read if there are more than `SAMPLE`, or their different words have
            more than `DISTINCT` characters, as whole lines do where words have no spaces between them.
        merges: pieces besides single characters and bytes.
        output: file of the sentencepiece model.

    Raises:
        ValueError: the text has no two characters to merge.
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
                raise ValueError(f"{names}: no subwords can be learned: {str(error).splitlines()[0]}") from error


def _sample(paths: Sequence[Path], every: int) -> Iterator[str]:
    for path in paths:
        with path.open(encoding="utf-8", newline="\n") as file:
            yield from (line.rstrip("\n") for line in islice(file, 0, None, every))


def write_dictionary(model: Path, output: Path) -> None:
    """Write all pieces of a model as a dictionary of fairseq, which puts its four special symbols before them."""
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(model))
    with writing(output) as file:
        file.writelines(f"{pieces.id_to_piece(n)} 1\n" for n in range(len(SPECIAL), pieces.get_piece_size()))


def segmenter(model: Path) -> Line:
    """Return a function that turns a line of text into pieces, separated by spaces."""
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(model))
    return lambda line: " ".join(pieces.encode(line, out_type=str))


def segment(model: Path, path: Path, output: Path) -> None:
    """Write the pieces of each line of a file, separated by spaces."""
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(model))
    with path.open(encoding="utf-8", newline="\n") as lines, writing(output) as file:
        stripped = (line.rstrip("\n") for line in bar(lines, desc=f"segment {output.name}", unit=" lines"))
        while block := list(islice(stripped, BLOCK)):
            file.writelines(f"{' '.join(line)}\n" for line in pieces.encode(block, out_type=str))
