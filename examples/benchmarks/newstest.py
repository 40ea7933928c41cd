#!/usr/bin/env python3
"""Time whole calls of fairseq-generate on a text, start-up included, with greedy and with beam search.

The table is like table 3 of Gehring et al. 2017, but for models with random weights.  The contestants are fairseq's
fconv, convs2s with the same weights, fairseq's transformer and the Weighted Transformer.  Our models also run with the
task translation_fast in each supported precision, and as exported folders if onnx and onnxruntime are installed. The
transformer also runs in CTranslate2 if ctranslate2 is installed.  The commands take turns.  The models never end a
sentence, so each translation is as long as the longest source of its batch.  All contestants therefore generate the
same number of tokens in the same batches.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from turns import (
    JSON,
    SIZES,
    build,
    convert_for_ctranslate2,
    describe_sizes,
    machine,
    parse_options,
    ratio,
    take_turns,
    write_json,
)

from fairseq_plugins.cli import export
from fairseq_plugins.cli.arguments import USER_DIR
from fairseq_plugins.cli.parallel_text import read_text
from fairseq_plugins.cli.processes import fairseq
from fairseq_plugins.convs2s.fconv import convert
from fairseq_plugins.cpu.packing import PRECISIONS

OPTIONS = (
    ("input", "", "text to translate, plain or gzipped, tokenised, one sentence per line"),
    ("sentences", 0, "number of sentences from the start of the text (0: all)"),
    *SIZES,
    ("max-tokens", 2000, "maximum number of tokens per batch, padding included; sentences are sorted by length"),
    ("beams", "1,5", "beam sizes"),
    ("only", "", "run only the contestants whose names contain one of these words, such as exported,CTranslate2"),
    JSON,
)
EXPORTED = {"float32": [], "int8": ["--int8"]}  # options by precision
FCONV, CONVS2S, TRANSFORMER, WEIGHTED = "fconv", "convs2s", "transformer", "weighted_transformer_small"

# Largest difference of log-probabilities, in bits, that counts as a tie.  Two words or hypotheses of a random model are
# sometimes equally likely, and fairseq prints only four decimals.
TIE = 1e-3

# A new process's peak memory includes the memory of its parent, so a small process starts the command.
_MEASURE = """
import json, resource, subprocess, sys
with open(sys.argv[1], "wb") as output:
    status = subprocess.call(sys.argv[2:], stdout=output)
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([usage.ru_maxrss, usage.ru_utime + usage.ru_stime]))
sys.exit(status)
"""


@dataclass(frozen=True)
class Contestant:
    """A command that translates the text.

    Attributes:
        command: program and arguments.
        beside: contestant to compare the translations with, if any.
        exact: whether the translations must equal those of ``beside``; ties (`Translation.ties`) count as equal.
        bare: whether the output has one translation per line, instead of fairseq-generate's format.
    """

    command: list[str]
    beside: str
    exact: bool
    bare: bool = False


@dataclass(frozen=True)
class Translation:
    """A translation, with log-probabilities in bits.

    Attributes:
        words: words.
        scores: log-probabilities of the words and of end-of-sentence; empty for other programs than fairseq.
        score: mean log-probability.
    """

    words: list[str]
    scores: list[float]
    score: float

    def ties(self, other: Translation) -> bool:
        """Return whether two translations have nearly equal log-probabilities.

        Translations tie if their mean log-probabilities are nearly equal, or if the log-probabilities of their first
        differing words are nearly equal.
        """
        pairs = zip(self.words, other.words, strict=False)
        if not self.scores:
            return False
        parting = next((at for at, (mine, theirs) in enumerate(pairs) if mine != theirs), 0)
        nearest = min(abs(self.score - other.score), abs(self.scores[parting] - other.scores[parting]))
        return nearest < TIE


@dataclass(frozen=True)
class Result:
    """Results of a command: peak memory in GB, CPU seconds of all cores, and translations."""

    peak: float
    processor: float
    translations: dict[int, Translation]

    @property
    def tokens(self) -> int:
        """Number of tokens in all translations, end-of-sentence tokens included."""
        return sum(len(each.words) + 1 for each in self.translations.values())


def make_data(args: Namespace, folder: Path) -> Dictionary:
    """Binarise the text for fairseq, and return its dictionary."""
    dictionary = Dictionary()
    with (folder / "test.en").open("w", encoding="utf-8", newline="\n") as file:
        for line in islice(read_text(Path(args.input), "en"), args.sentences or None):
            dictionary.encode_line(line, append_eos=False)
            file.write(line + "\n")
    dictionary.finalize(nwords=args.vocabulary, padding_factor=args.vocabulary)
    for language in ("en", "de"):
        dictionary.save(str(folder / f"dict.{language}.txt"))
    texts = ["--testpref", folder / "test", "--only-source", "--srcdict", folder / "dict.en.txt"]
    fairseq("preprocess", "-s", "en", "-t", "de", *texts, "--destdir", folder / "data-bin")
    (folder / "dict.de.txt").rename(folder / "data-bin" / "dict.de.txt")
    return dictionary


def make_models(args: Namespace, dictionary: Dictionary, folder: Path) -> None:
    """Write checkpoints of all models."""
    layers = f"[({args.width}, {args.kernel})] * {args.layers}"
    save(FCONV, "fconv_wmt_en_ro", dictionary, folder, encoder_layers=layers, decoder_layers=layers)
    torch.save(convert(checkpoint_utils.load_checkpoint_to_cpu(str(folder / FCONV))), folder / CONVS2S)
    depth = args.transformer_layers
    for name in (TRANSFORMER, WEIGHTED):
        save(name, name, dictionary, folder, encoder_layers=depth, decoder_layers=depth, share_all_embeddings=True)


def export_models(folder: Path) -> None:
    """Export our models in float32 and int8."""
    parser = ArgumentParser()
    export.add_arguments(parser)
    for name in (CONVS2S, WEIGHTED):
        for precision, options in EXPORTED.items():
            words = [folder / name, folder / f"{name}.{precision}", "--data", folder / "data-bin", *options]
            export.run(parser.parse_args([str(word) for word in words]))


def save(name: str, architecture: str, dictionary: Dictionary, folder: Path, **sizes: object) -> None:
    """Write a checkpoint of a model with random weights, in the format of fairseq's trainer."""
    options, model = build(architecture, dictionary, **sizes)
    parameters = model.state_dict()
    if "decoder.fc3.weight_g" in parameters:
        # fconv's initial weights make all words almost equally likely, so that rounding would often decide between
        # words.
        parameters["decoder.fc3.weight_g"] *= 10
    for output in ("decoder.fc3.weight_g", "decoder.output_projection.weight"):
        if output in parameters:
            # The start and end tokens are never predicted: their rows of zeros in the output layer give logits of zero,
            # and the largest logits are above zero.
            parameters[output][[dictionary.bos(), dictionary.eos()]] = 0
    settings = {**vars(options), "task": "translation", "data": "", "source_lang": "en", "target_lang": "de"}
    history = [{"num_updates": 1, "optimizer_name": "adam", "lr_scheduler_state": {}, "criterion_name": "x"}]
    state = {"args": Namespace(**settings), "model": parameters, "optimizer_history": history, "extra_state": {}}
    torch.save(state, folder / name)


def contestants(args: Namespace, folder: Path, beam: int) -> dict[str, Contestant]:
    """Return all commands by their names in the table."""
    generate = [sys.executable, "-W", "ignore", "-m", "fairseq_cli.generate", str(folder / "data-bin")]
    generate += ["--user-dir", str(USER_DIR), "-s", "en", "-t", "de", "--beam", str(beam)]
    batches = ["--max-tokens", str(args.max_tokens)]
    # If a batch's longest source has N tokens, end-of-sentence included, a translation has at most N words.
    lengths = ["--max-len-a", "1", "--max-len-b", "0"]
    generate += [*batches, "--required-batch-size-multiple", "1", *lengths]
    found = {}
    for name, beside in ((FCONV, FCONV), (CONVS2S, FCONV), (TRANSFORMER, TRANSFORMER), (WEIGHTED, WEIGHTED)):
        command = [*generate, "--path", str(folder / name), "--task"]
        found[name] = Contestant([*command, "translation"], beside, exact=True)
        if name in (CONVS2S, WEIGHTED):
            for precision in [precision for precision, (_, is_supported) in PRECISIONS.items() if is_supported()]:
                found[f"{name}, translation_fast, {precision}"] = Contestant(
                    [*command, "translation_fast", "--cpu-dtype", precision], beside, exact=precision == "float32"
                )
            for precision in EXPORTED if has_onnx() else ():
                words = [folder / f"{name}.{precision}" / "translate.py", *batches, *lengths, "--beam", beam]
                words += ["--threads", args.threads, "--input", folder / "test.en"]
                found[f"{name}, exported, {precision}"] = Contestant(
                    [sys.executable, *map(str, words)], beside, exact=False, bare=True
                )
    if find_spec("ctranslate2"):
        script = Path(__file__).with_name("ctranslate2_command.py")
        for precision in EXPORTED:
            words = [script, folder / "ctranslate2", folder / "test.en", precision, beam, args.max_tokens, args.threads]
            found[f"CTranslate2, {precision}"] = Contestant([sys.executable, *map(str, words)], "", exact=False)
    only = [word for word in args.only.split(",") if word]
    chosen = {name: each for name, each in found.items() if not only or any(word in name for word in only)}
    if not chosen:
        sys.exit(f"--only {args.only}: no contestant has such a name; use words of {', '.join(found)}")
    return chosen


def has_onnx() -> bool:
    """Return whether the packages that exported models need are installed."""
    return all(map(find_spec, ("onnx", "onnxruntime")))


def run(contestant: Contestant, output: Path, threads: int) -> Result:
    """Run a contestant's command in its own process."""
    finished = subprocess.run(
        [sys.executable, "-S", "-c", _MEASURE, str(output), *contestant.command],
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode:
        sys.exit(f"{' '.join(contestant.command)} failed:\n{finished.stderr[-3000:]}")
    kilobytes, processor = json.loads(finished.stdout)
    translations = {}
    with output.open(encoding="utf-8", newline="\n") as lines:
        for number, line in enumerate(lines):
            if contestant.bare:
                translations[number] = Translation(line.split(), [], math.nan)
            elif line.startswith("H-"):
                name, score, words = line.rstrip("\n").split("\t")
                translations[int(name[2:])] = Translation(words.split(), [], float(score))
            elif line.startswith("P-"):
                name, scores = line.split("\t")
                translations[int(name[2:])].scores.extend(map(float, scores.split()))
    return Result(kilobytes / 2**20, processor, translations)


def compare(result: Result, other: Result) -> tuple[int, int]:
    """Return how many translations are equal, and how many of the others have equal scores."""
    pairs = [(ours, other.translations[number]) for number, ours in result.translations.items()]
    parted = [(ours, theirs) for ours, theirs in pairs if ours.words != theirs.words]
    return len(pairs) - len(parted), sum(ours.ties(theirs) for ours, theirs in parted)


def measure(args: Namespace, folder: Path, beam: int) -> list[dict[str, Any]]:
    """Return a row of the table for each contestant."""
    entrants = contestants(args, folder, beam)
    runs = {name: partial(run, entrant, folder / "output", args.threads) for name, entrant in entrants.items()}
    seconds, results = take_turns(runs, args.rounds, warm_up=0)
    first, rows = next(iter(results)), []
    for name, result in results.items():
        row = {
            "beam": beam,
            "contestant": name,
            "sentences": len(result.translations),
            "tokens": result.tokens,
            "seconds": seconds[name],
            "times as fast as the first": ratio(seconds[first], seconds[name]),
            "processor seconds": result.processor,
            "peak GB": result.peak,
            "failed": result.tokens != results[first].tokens,
        }
        if (beside := entrants[name].beside) in results:
            same, ties = compare(result, results[beside])
            row |= {"beside": beside, "equal": same, "ties": ties}
            row["failed"] |= entrants[name].exact and same + ties < len(result.translations)
        rows.append(row)
    return rows


def main() -> None:
    args = parse_options(__doc__, OPTIONS)
    if not args.input:
        sys.exit("--input: missing; give the text to translate")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_models(args, make_data(args, folder), folder)
        if has_onnx():
            export_models(folder)
        if find_spec("ctranslate2"):
            convert_for_ctranslate2(folder / TRANSFORMER, folder / "data-bin", folder / "ctranslate2")
        rows = [row for beam in args.beams.split(",") for row in measure(args, folder, int(beam))]
    print_table(args, rows)
    write_json(args, rows)
    if failed := [f"{row['contestant']}, beam {row['beam']}" for row in rows if row["failed"]]:
        sys.exit(f"{', '.join(failed)}: unexpected translations, so the figures above mean nothing")


def print_table(args: Namespace, rows: list[dict[str, Any]]) -> None:
    """Print all rows, and the settings of the measurement."""
    print(describe_sizes(args))
    print(f"{rows[0]['sentences']} sentences, {rows[0]['tokens']} output tokens, batches of {args.max_tokens} words")
    print(f"{machine(args)}\n")
    faster = f"times as fast as {rows[0]['contestant']}"
    print(f"| beam | | seconds | {faster} | processor seconds | tokens per second | peak GB | equal |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        seconds = statistics.median(row["seconds"])
        print(
            f"| {row['beam']} | {row['contestant']} | {seconds:.1f} | {row['times as fast as the first']:.2f} | "
            f"{row['processor seconds']:.1f} | {row['tokens'] / seconds:.0f} | {row['peak GB']:.2f} | "
            + (f"{row['equal']} of {row['sentences']} |" if "equal" in row else "|")
        )


if __name__ == "__main__":
    main()
