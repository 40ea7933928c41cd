"""Preparation of text for ``own-data``: cleaning, subwords, and fairseq's binary data.

Existing files are not created again.  Subwords are reversible pieces of sentencepiece, or Moses' tokens with
subword-nmt's BPE.  sentencepiece keeps all characters and spaces; it encodes a character without a piece
as UTF-8 bytes.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import sentencepiece

from fairseq_plugins.cli import parallel_text
from fairseq_plugins.cli.own_data.cleaning import FilePair, clean, read_pairs, report
from fairseq_plugins.cli.own_data.folder import FIGURES, PARTS, SETTINGS, Folder
from fairseq_plugins.cli.parallel_text import Line, bar, writing
from fairseq_plugins.cli.processes import fairseq
from fairseq_plugins.common.files import beside, count_lines, digest, replacing

# Number of BPE merges (value) for a training text with fewer sentence pairs than a limit (key). 6000 merges were best
# for 29 000 image captions; fairseq's IWSLT'14 recipe uses 10 000 merges for 160 000 pairs.
MERGES = {20_000: 2000, 100_000: 6000, 1_000_000: 10_000}
MOST_MERGES = 40_000
SAMPLE = 1_000_000  # maximum number of lines to learn pieces from
# Maximum number of characters in the distinct words to learn pieces from; a character takes about 130 bytes of memory.
DISTINCT = 8_000_000
COVERAGE = 0.9995  # share of the text's characters that get a piece; rarer characters become bytes
SPECIAL = ("<unk>", "<s>", "</s>", "<pad>")  # fairseq's special symbols; segmented text never contains them
OTHER_SPACE = re.compile(r"[^\S ]+")  # whitespace except spaces; fairseq would split a piece there
# sentencepiece writes a space as U+2581. To keep decoding unambiguous, each U+2581 in the text is replaced by the
# sequence U+FDD0 U+FDD1 of two Unicode noncharacters, and each U+FDD0 in the text by the sequence U+FDD0 U+FDD2.
ESCAPES = {"2581": "FDD0 FDD1", "FDD0": "FDD0 FDD2"}
BLOCK = 10_000  # lines per call of sentencepiece


def refuse_foreign_files(folder: Folder, model: Path) -> None:
    """Refuse to overwrite files that own-data did not create."""
    if not (folder.path / SETTINGS).exists():
        names = ("text", "data-bin", "subwords.model", "code", "tokens", "pieces.txt")
        segmented = [path for part in PARTS for path in folder.segmented(part)]
        for path in (model, *(folder.path / name for name in names), *segmented):
            if path.exists():
                raise ValueError(f"{path} already exists and was not created by own-data: choose another folder")


def prepare(
    folder: Folder,
    texts: Mapping[str, Sequence[FilePair]],
    keep: Set[str] = frozenset(),
    workers: int = 1,
    base: Folder | None = None,
) -> None:
    """Create the missing files of the folder.

    Args:
        folder: the folder.
        texts: files of ``train``, and optionally of ``valid`` and ``test``.
        keep: cleaning rules to skip; pairs that break only these rules are kept.
        workers: number of processes.
        base: folder whose subwords and dictionary are reused; if None, they are learned from the text.
    """
    record, text = folder.path / SETTINGS, folder.path / "text"
    now = {
        "languages": list(folder.languages),
        "tokenizer": folder.tokenizer,
        "keep": sorted(keep),
        "subwords": None if base is None else digest(base.subwords, "sha256"),
        "texts": {
            part: [[file.name, digest(file, "sha256")] for pair in files for file in dict.fromkeys(pair)]
            for part, files in texts.items()
        },
    }
    if not text.exists():
        with beside(text) as unfinished:
            unfinished.mkdir(parents=True)
            parts = {part: read_pairs(files, folder.languages) for part, files in texts.items()}
            figures = clean(parts, folder.languages, unfinished, keep)
            (unfinished / FIGURES).write_text(json.dumps(figures), encoding="utf-8")
            with writing(record) as file:
                file.write(json.dumps(now, indent=1) + "\n")
        print(report(figures), file=sys.stderr)
    elif json.loads(record.read_text(encoding="utf-8")) != now:
        raise ValueError(
            f"{folder.path} has other text or options (see {record}): choose another folder, or repeat the texts and "
            "options of the first call"
        )
    if not folder.binary.exists():
        if base is not None and not folder.subwords.exists():
            with replacing(folder.subwords) as unfinished:
                shutil.copyfile(base.subwords, unfinished)
        segment(folder, workers)
        binarise(folder, workers, base)


def merges_for(pairs: int) -> int:
    """Return the number of BPE merges for a number of training pairs."""
    return next((merges for limit, merges in MERGES.items() if pairs < limit), MOST_MERGES)


def segment(folder: Folder, workers: int) -> None:
    """Learn subwords from the training part, unless the folder has them, and segment all parts."""
    is_moses = folder.tokenizer == "moses"
    inputs = {part: tokenise(folder, part, workers) if is_moses else folder.text(part) for part in folder.parts}
    if not folder.subwords.exists():
        learn = parallel_text.learn_codes if is_moses else learn_pieces
        learn(inputs["train"], merges_for(count_lines(inputs["train"][0])), folder.subwords)
    for part, paths in inputs.items():
        for path, output in zip(paths, folder.segmented(part), strict=True):
            if not output.exists() and is_moses:
                parallel_text.apply_codes(folder.subwords, path, output, workers)
            elif not output.exists():
                segment_by_pieces(folder.subwords, path, output)


def tokenise(folder: Folder, part: str, workers: int) -> list[Path]:
    """Tokenise a part with Moses, and return the two files of tokens."""
    outputs = []
    for language, text in zip(folder.languages, folder.text(part), strict=True):
        outputs.append(output := folder.path / "tokens" / text.name)
        if not output.exists():
            lines = parallel_text.read_text(text, "")
            with writing(output) as file:
                make = partial(parallel_text.moses, language)
                file.writelines(f"{line}\n" for line in parallel_text.each_line(make, lines, workers))
    return outputs


def binarise(folder: Folder, workers: int, base: Folder | None) -> None:
    """Run ``fairseq-preprocess`` with a joined dictionary, so that embeddings can be tied."""
    unfinished = folder.binary.with_name("data-bin.partial")
    shutil.rmtree(unfinished, ignore_errors=True)  # fairseq refuses to overwrite dictionaries
    source, target = folder.languages
    options = ["--source-lang", source, "--target-lang", target, "--destdir", unfinished, "--joined-dictionary"]
    options += ["--workers", workers]
    options += [word for part in folder.parts for word in (f"--{part}pref", folder.path / part)]
    if folder.tokenizer == "sentencepiece":  # list all pieces, including pieces that are not in the text
        write_dictionary(folder.subwords, folder.path / "pieces.txt")
        options += ["--srcdict", folder.path / "pieces.txt"]
    elif base is not None:
        options += ["--srcdict", base.binary / f"dict.{source}.txt"]
    fairseq("preprocess", *options)
    unfinished.rename(folder.binary)


def source_segmenter(folder: Folder) -> Line:
    """Return a function that turns a line of source text into subwords."""
    if folder.tokenizer == "sentencepiece":
        pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder.subwords))
        return lambda line: " ".join(pieces.encode(line, out_type=str))
    tokenise, split = parallel_text.moses(folder.languages[0]), parallel_text.segmenter(folder.subwords)
    return lambda line: split(tokenise(line))


def learn_pieces(paths: Sequence[Path], merges: int, output: Path) -> None:
    """Learn one BPE from all files (Sennrich et al. 2016, sentencepiece's ``bpe``).

    Only every n-th line is used if there are more than `SAMPLE` lines, or if the distinct words together have more than
    `DISTINCT` characters, as happens in languages without spaces.

    Args:
        paths: text, one sentence per line.
        merges: number of pieces in addition to characters and bytes.
        output: file of the sentencepiece model.
    """
    every = -(-sum(map(count_lines, paths)) // SAMPLE)
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
    counts = np.cumsum(sorted(characters.values(), reverse=True))
    covered = int(np.searchsorted(counts, COVERAGE * counts[-1])) + 1
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
    """Write the pieces of a model as a fairseq dictionary; fairseq itself adds the special symbols."""
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(model))
    with writing(output) as file:
        file.writelines(f"{pieces.id_to_piece(n)} 1\n" for n in range(len(SPECIAL), pieces.get_piece_size()))


def segment_by_pieces(model: Path, path: Path, output: Path) -> None:
    """Write the pieces of each line of a file, separated by spaces."""
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(model))
    with path.open(encoding="utf-8", newline="\n") as lines, writing(output) as file:
        stripped = (line.rstrip("\n") for line in bar(lines, desc=f"segment {output.name}", unit=" lines"))
        while block := list(islice(stripped, BLOCK)):
            file.writelines(f"{' '.join(line)}\n" for line in pieces.encode(block, out_type=str))
