"""The folder OUT of ``own-data``: its paths, its trained models, and translations of its held-out text.

``text`` contains the cleaned lines of each part.  ``train.en`` and similar files contain each part's
subwords.  ``data-bin`` contains the binary data.  Folders with the names of architectures contain models.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fairseq_plugins.cli.generated import Sentence, read_generated
from fairseq_plugins.cli.parallel_text import read_text
from fairseq_plugins.cli.processes import ALL_SENTENCES, NO_LONG_ONES, fairseq

SETTINGS = "settings"
PARTS = {"train": "training", "valid": "validation", "test": "test"}  # keys are for file names, values are for messages
TOKENIZERS = ("sentencepiece", "moses")
BEAM = 5
METRICS = {"loss": "loss", "chrf": "chrF", "bleu": "BLEU"}  # values of --metric, and their names in messages
# Validation uses greedy search.  The length limit saves time in the first epochs, when models repeat words.
VALIDATION_SEARCH = {"beam": 1, "max_len_a": 2, "max_len_b": 10, "unkpen": 1000}
FIGURES = "figures.json"  # report of the cleaning, in the folder ``text``
BEST = "checkpoint_best.pt"
FINISHED = "finished"  # file with --metric and --train of a finished training; see `read_record`
# A resumed training may change the options in ENDS, which limit only the length of the training.
ENDS = ("--max-epoch", "--max-update", "--patience", "--stop-time-hours", "--stop-min-lr")


@dataclass(frozen=True)
class Folder:
    """Paths, languages and tokenizer of one folder of own-data."""

    path: Path
    languages: tuple[str, str]  # source language and target language
    tokenizer: str  # a value in `TOKENIZERS`

    @property
    def binary(self) -> Path:
        """Return the folder of binary data."""
        return self.path / "data-bin"

    @property
    def subwords(self) -> Path:
        """Return the file of the sentencepiece model or of the BPE codes."""
        return self.path / ("subwords.model" if self.tokenizer == "sentencepiece" else "code")

    @property
    def parts(self) -> list[str]:
        """Return the parts that have text."""
        return [part for part in PARTS if self.text(part)[0].exists()]

    @property
    def scored_part(self) -> str:
        """Return the part to score: ``test`` if there is one, otherwise ``valid``."""
        return self.parts[-1]

    def text(self, part: str) -> tuple[Path, Path]:
        """Return the source and target file of a part's text."""
        source, target = self.segmented(part)
        return self.path / "text" / source.name, self.path / "text" / target.name

    def segmented(self, part: str) -> tuple[Path, Path]:
        """Return the source and target file of a part's subwords."""
        source, target = self.languages
        return self.path / f"{part}.{source}", self.path / f"{part}.{target}"

    def decoding_options(self, checkpoint: Path, user_dir: Path) -> list[object]:
        """Return options of fairseq's commands for translating with a model."""
        source, target = self.languages
        options: list[object] = [self.binary, "--source-lang", source, "--target-lang", target, "--user-dir", user_dir]
        options += ["--path", checkpoint, "--beam", BEAM, "--task", "translation_fast"]
        if self.tokenizer == "sentencepiece":
            # sentencepiece's pieces can spell any text, so no translation needs <unk>.
            return [*options, "--bpe", "sentencepiece", "--sentencepiece-model", self.subwords, "--unkpen", 1000]
        return [*options, "--tokenizer", "moses", "--bpe", "subword_nmt", "--bpe-codes", self.subwords]

    def validation_options(self, metric: str) -> list[str]:
        """Return options of fairseq-train for validation by BLEU or chrF; return no options for the loss."""
        if metric == "loss":
            return []
        if self.tokenizer == "sentencepiece":
            detok, bpe = {"sentencepiece_model": str(self.subwords)}, "none"
        else:
            detok, bpe = dict(zip(("source_lang", "target_lang"), self.languages, strict=True)), "subword_nmt"
        words = f"--task translation_fast --best-checkpoint-metric {metric} --maximize-best-checkpoint-metric"
        words += f" --eval-bleu --eval-bleu-remove-bpe {bpe} --eval-bleu-detok {self.tokenizer}"
        arguments = ["--eval-bleu-args", json.dumps(VALIDATION_SEARCH), "--eval-bleu-detok-args", json.dumps(detok)]
        return [*words.split(), *arguments]

    @property
    def preprocessing(self) -> dict[str, Path | str | None]:
        """Return the options of ``fairseq-plugins export`` that describe the preprocessing, by name."""
        pieces = self.subwords if self.tokenizer == "sentencepiece" else None
        codes, tokenizer = (self.subwords, "moses") if pieces is None else (None, None)
        return {"sentencepiece_model": pieces, "bpe_codes": codes, "tokenizer": tokenizer}


def existing(path: Path) -> Folder | None:
    """Return the folder that an earlier call of own-data created at ``path``, or None."""
    record = path / SETTINGS
    if not record.is_file():
        return None
    try:
        settings = json.loads(record.read_text(encoding="utf-8"))
        return Folder(path, tuple(settings["languages"]), settings["tokenizer"])
    except (ValueError, TypeError, KeyError):
        raise ValueError(
            f"{record} is damaged or was not written by this version of own-data: choose another folder"
        ) from None


def is_trained(model: Path) -> bool:
    """Return whether a model's folder has a finished training and the best checkpoint."""
    return (model / FINISHED).exists() and (model / BEST).exists()


def trained_archs(output: Path) -> list[str]:
    """Return the architectures of the trained models in a folder."""
    return sorted(path.parent.name for path in output.glob(f"*/{FINISHED}") if is_trained(path.parent))


def find_model(output: Path, arch: str | None) -> tuple[Folder, Path]:
    """Return a folder of ``own-data`` and the subfolder of a trained model.

    ``arch`` may be None if the folder has only one trained model.
    """
    folder, archs = existing(output), trained_archs(output)
    if folder is None:
        raise ValueError(f"{output} is not a folder of own-data (no file {SETTINGS}): give the OUT of own-data")
    if not archs or not folder.binary.exists() or not (output / "text").exists():
        raise ValueError(f"{output} has no text, binary data or trained model yet: run own-data again to complete it")
    if arch is None and len(archs) > 1:
        raise ValueError(f"{output} has several trained models: give --arch {' or '.join(archs)}")
    if arch is not None and arch not in archs:
        raise ValueError(f"--arch {arch}: {output} has no such trained model; give --arch {' or '.join(archs)}")
    return folder, output / (arch or archs[0])


def record_of(metric: str, train: str) -> str:
    """Return the content of the file `FINISHED`: the options of --train.

    If the metric is not loss, --metric precedes these options.
    """
    return train if metric == "loss" else f"--metric {metric} {train}"


def read_record(path: Path) -> tuple[str, list[str]]:
    """Read the metric and the options of --train from the file `FINISHED`."""
    words = shlex.split(path.read_text(encoding="utf-8"))
    if len(words) > 1 and words[0] == "--metric" and words[1] in METRICS:
        return words[1], words[2:]
    return "loss", words


def without_ends(wishes: Sequence[str]) -> list[str]:
    """Return options of fairseq-train without the options in `ENDS` and their values."""
    kept: list[str] = []
    words = iter(wishes)
    for word in words:
        if word in ENDS:
            next(words, None)
        elif word.partition("=")[0] not in ENDS:
            kept.append(word)
    return kept


@dataclass(frozen=True)
class Base:
    """The base model of an adaptation, and the folder of own-data that contains the model."""

    folder: Folder
    checkpoint: Path

    @property
    def arch(self) -> str:
        """Return the architecture."""
        return self.checkpoint.parent.name

    @property
    def wishes(self) -> list[str]:
        """Return the options of --train for the base model, except the options in `ENDS`."""
        return without_ends(read_record(self.checkpoint.parent / FINISHED)[1])


def find_base(path: Path, arch: str | None) -> Base:
    """Return the base model at a path: a folder of own-data, or a checkpoint in such a folder."""
    if path.is_file():
        if arch not in (None, path.parent.name):
            raise ValueError(f"--arch {arch}: {path} has the architecture {path.parent.name}; omit --arch")
        return Base(find_model(path.parent.parent, path.parent.name)[0], path)
    folder, model = find_model(path, arch)
    return Base(folder, model / BEST)


@dataclass(frozen=True)
class HeldOut:
    """The translated lines of a held-out part, ``test`` or ``valid``."""

    part: str
    language: str  # target language
    sources: Sequence[str]  # source lines before preprocessing
    references: Sequence[str]
    sentences: Sequence[Sentence]  # n-best lists of the model
    left_out: int  # number of lines that are too long for the model

    @property
    def translations(self) -> list[str]:
        """Return the best translation of each line."""
        return [sentence.hypotheses[0].text for sentence in self.sentences]

    def describe(self) -> str:
        """Return a heading for scores, with the numbers of scored and skipped lines."""
        skipped = f"; skipped, too long for the model: {self.left_out}" if self.left_out else ""
        return f"Scores on the {PARTS[self.part]} part (held-out lines: {len(self.sentences)}{skipped}):"


def generated(results: Path, part: str) -> Path:
    """Return the path of fairseq-generate's output in a folder."""
    return results / f"generate-{part}.txt"


def generate(results: Path, part: str, options: Sequence[object]) -> None:
    """Run ``fairseq-generate`` on a part; ``options`` choose data, checkpoint and search."""
    options = [*options, "--gen-subset", part, "--remove-bpe", "--max-tokens", 4000, "--results-path", results]
    fairseq("generate", *options, *ALL_SENTENCES, *NO_LONG_ONES)


def is_complete(path: Path, checkpoint: Path) -> bool:
    """Return whether a file is complete output of fairseq-generate, and not older than the checkpoint."""
    if not path.exists() or path.stat().st_mtime < checkpoint.stat().st_mtime:
        return False
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 10_000))
        return b"\nGenerate " in file.read()


def read_held_out(folder: Folder, results: Path, part: str) -> HeldOut:
    """Read fairseq-generate's output for a held-out part, and the part's text without preprocessing."""
    sentences = read_generated([generated(results, part)])
    pairs = list(zip(*(read_text(path, "") for path in folder.text(part)), strict=True))
    if sentences[-1].number >= len(pairs):
        raise ValueError(
            f"{generated(results, part)} has more sentences than {folder.text(part)[1]} ({len(pairs)} lines): remove "
            "the first file and run the command again"
        )
    sources, references = zip(*(pairs[sentence.number] for sentence in sentences), strict=True)
    return HeldOut(part, folder.languages[1], sources, references, sentences, len(pairs) - len(sentences))
