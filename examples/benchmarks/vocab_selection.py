#!/usr/bin/env python3
"""Time generation and training with vocabulary selection, and with the whole target vocabulary.

The models have random weights.  The timed runs either translate sentences of a text to outputs as long as their
sources, or train a model on sentences of the same text.  Runs with all target words take turns with runs that use only
the candidate words of each batch.  If all words are candidates, hypotheses and losses must equal those of fairseq's
search and criterion.  Each peak of memory is measured in a separate process.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.data import Dictionary
from fairseq.models import BaseFairseqModel
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor
from turns import build, compare, machine, make_dictionary, parse_options, ratio, take_turns

from fairseq_plugins.cli.parallel_text import read_text
from fairseq_plugins.search.generator import FastBeamSearch
from fairseq_plugins.vocabulary.candidates import Candidates, VocabSelectionCrossEntropy

OPTIONS = (
    ("input", "", "source text, plain or gzipped, one sentence per line"),
    ("arch", "convs2s_analysis", "architecture"),
    ("vocabulary", 160000, "target words"),
    ("candidates-per-word", 50, "candidate translations of each source word"),
    ("frequent-candidates", 5000, "frequent words that are candidates of every batch"),
    ("sentences", 16, "sentences per generation batch"),
    ("train-sentences", 64, "sentences per training batch"),
    ("batches", 3, "generation batches per turn"),
    ("beam", 5, "beam size"),
    ("memory-of", "", "only measure the peak memory of one run, such as 'generation full' or 'training selected'"),
)
FULL, SELECTED = "full", "selected"


class Bench:
    """A model, its data, and the functions that are timed."""

    def __init__(self, args: Namespace) -> None:
        if not args.input:
            sys.exit("--input: missing; give the text to translate")
        sentences = [line.split() for line in read_text(Path(args.input), "")]
        self.source = Dictionary()
        for sentence in sentences:
            for word in sentence:
                self.source.add_symbol(word)
        self.target = make_dictionary(args.vocabulary)
        self.args = args
        always = torch.zeros(args.vocabulary, dtype=torch.bool)
        always[: self.target.nspecial + args.frequent_candidates] = True
        table = torch.randint(self.target.nspecial, args.vocabulary, (len(self.source), args.candidates_per_word))
        self.candidates = Candidates(table.int(), always)
        self.everything = Candidates(table.int(), torch.ones_like(always))
        # fairseq sorts sentences by length, so the sentences of a batch have similar lengths.  In this benchmark, all
        # sentences have about the median length of the text.
        middle = sorted(sentences, key=len)[len(sentences) // 2 :]
        wanted = args.sentences * args.batches
        self.batches = [self.encode(middle[i : i + args.sentences]) for i in range(0, wanted, args.sentences)]
        self.training = self.encode(middle[: args.train_sentences])

    def encode(self, sentences: list[list[str]]) -> dict[str, Any]:
        """Return a batch in fairseq's sample format, with random targets as long as the sources."""
        lengths = torch.tensor([len(sentence) + 1 for sentence in sentences])
        tokens = torch.full((len(sentences), int(lengths.max())), self.source.pad())
        for row, sentence in zip(tokens, sentences, strict=True):
            row[: len(sentence) + 1] = self.source.encode_line(" ".join(sentence), add_if_not_exist=False).long()
        target = torch.randint(self.target.nspecial, self.args.vocabulary, tokens.shape)
        target = target.masked_fill(tokens.eq(self.source.pad()), self.target.pad())
        inputs = {"src_tokens": tokens, "src_lengths": lengths, "prev_output_tokens": target.roll(1, dims=1)}
        return {"net_input": inputs, "target": target, "ntokens": int(lengths.sum()), "nsentences": len(sentences)}

    def model(self) -> BaseFairseqModel:
        """Build a model with random weights."""
        torch.manual_seed(self.args.seed)
        return build(self.args.arch, self.source, self.target)[1]

    def generate(self, model: BaseFairseqModel, candidates: Candidates | None) -> list[Any]:
        """Translate all batches with forced lengths, because a random model hardly ever ends a sentence."""
        hypotheses: list[Any] = []
        for batch in self.batches:
            length = batch["net_input"]["src_tokens"].size(1) - 1
            options = {"beam_size": self.args.beam, "max_len_b": length, "min_len": length}
            search = (
                SequenceGenerator([model], self.target, **options)
                if candidates is None
                else FastBeamSearch([model], self.target, candidates=candidates, **options)
            )
            hypotheses += search.generate(None, batch)
        return hypotheses

    def criterion(self, candidates: Candidates | None) -> Any:
        """Return label-smoothed cross-entropy."""
        task = SimpleNamespace(target_dictionary=self.target, candidates=candidates)
        kind = LabelSmoothedCrossEntropyCriterion if candidates is None else VocabSelectionCrossEntropy
        return kind(task, sentence_avg=False, label_smoothing=0.1)

    def update(self, model: BaseFairseqModel, optimizer: torch.optim.SGD, criterion: Any) -> Tensor:
        """Make an update with plain SGD."""
        optimizer.zero_grad()
        loss, size, _ = criterion(model, self.training)
        (loss / size).backward()
        optimizer.step()
        return loss.detach()


def contestants(bench: Bench, work: str, which: tuple[str, ...]) -> dict[str, Callable[[], Any]]:
    """Return the functions to time, for generation or training, by name of the vocabulary (full or selected)."""
    model = bench.model()
    chosen = {FULL: None, SELECTED: bench.candidates}
    if work == "generation":
        model.eval()
        model.make_generation_fast_(need_attn=False)
        return {name: partial(bench.generate, model, chosen[name]) for name in which}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return {name: partial(bench.update, model, optimizer, bench.criterion(chosen[name])) for name in which}


def check(bench: Bench, work: str) -> str:
    """Check that results equal fairseq's if all words are candidates, and describe the comparison."""
    model = bench.model().eval()
    if work == "generation":
        model.make_generation_fast_(need_attn=False)
        equal, pairs, difference = compare(bench.generate(model, bench.everything), bench.generate(model, None))
        if equal < pairs:
            sys.exit(
                f"{pairs - equal} hypotheses with all words as candidates differ from fairseq's, so ignore the speeds"
            )
        return f"{equal} of {pairs} hypotheses are the same as fairseq's if all words are candidates"
    with torch.no_grad():
        losses = [float(bench.criterion(which)(model, bench.training)[0]) for which in (bench.everything, None)]
    difference = abs(losses[0] - losses[1]) / losses[1]
    if difference > 1e-6:
        sys.exit(f"the loss with all words as candidates differs from fairseq's by {difference}, so ignore the speeds")
    return f"the loss with all words as candidates differs from fairseq's by {difference:.0e}"


def peak_memory(work: str, name: str) -> float:
    """Return the peak memory, in GB, of a separate process that does only this run."""
    command = [sys.executable, "-W", "ignore", *sys.argv, "--memory-of", f"{work} {name}"]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def main() -> None:
    args = parse_options(__doc__, OPTIONS)
    bench = Bench(args)
    if args.memory_of:
        work, name = args.memory_of.split()
        contestants(bench, work, (name,))[name]()
        # The peak of getrusage would include the memory of the parent process.
        peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        print(int(peak[1]) / 2**20 if peak else float("nan"))
        return
    sizes = [
        int(bench.candidates.mask(batch["net_input"]["src_tokens"]).sum()) for batch in (*bench.batches, bench.training)
    ]
    lengths = [batch["net_input"]["src_tokens"].size(1) - 1 for batch in bench.batches]
    print(f"{args.arch}, {args.vocabulary} target words; {machine(args)}")
    print(
        f"generation: {args.batches} x {args.sentences} sentences of {min(lengths)} to {max(lengths)} words, beam ",
        end="",
    )
    print(f"{args.beam}, {statistics.mean(sizes[:-1]):.0f} candidates a batch")
    print(
        f"training: an update with {bench.training['ntokens']} words, and {sizes[-1]} candidates, to which "
        "the words of the references are added\n"
    )
    print(f"{'':12}{'full, s':>10}{'selected, s':>13}{'faster':>9}{'full, GB':>11}{'selected, GB':>14}   check")
    for work in ("generation", "training"):
        seconds, _ = take_turns(contestants(bench, work, (FULL, SELECTED)), args.rounds)
        full, selected = (statistics.median(seconds[name]) for name in (FULL, SELECTED))
        memory = [peak_memory(work, name) for name in (FULL, SELECTED)]
        print(
            f"{work:12}{full:10.2f}{selected:13.2f}{ratio(seconds[FULL], seconds[SELECTED]):8.1f}x"
            f"{memory[0]:11.2f}{memory[1]:14.2f}   {check(bench, work)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
