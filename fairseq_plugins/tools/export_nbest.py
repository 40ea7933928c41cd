"""``fairseq-plugins export-nbest``: fairseq's n-best lists in the format of Moses, for rerankers and tuners.

Each line is ``sentence ||| hypothesis ||| LogProbability= x Length= n ||| score``: x is a natural logarithm, n includes
the end of the sentence, and the score is x / n^A, by which a sentence's hypotheses are ordered.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from fairseq_plugins.tools.arguments import refuse_input_as_output, refuse_unreadable
from fairseq_plugins.tools.generated import LARGEST, add_generated, read_generated
from fairseq_plugins.tools.parallel_text import writing

__all__ = ["add_arguments", "run"]


def add_arguments(parser: ArgumentParser) -> None:
    add_generated(parser, "fairseq-generate or fairseq-interactive")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="list to write")
    parser.add_argument(
        "--lenpen", type=float, default=1.0, metavar="A", help="length penalty in the score (default: %(default)g)"
    )


def run(args: Namespace) -> None:
    """Write the list; ``|||`` inside a hypothesis is escaped as Moses does it.

    Raises:
        ValueError: the output is one of the inputs, which cannot be read, or the penalty is not a number.
    """
    if not abs(args.lenpen) <= LARGEST:
        raise ValueError(f"--lenpen: expected a number between -{LARGEST} and {LARGEST}")
    refuse_unreadable(*args.generated)
    refuse_input_as_output(args.output, args.generated)
    lines = [
        f"{sentence.number} ||| {hyp.words.replace('|||', '&#124;' * 3)} ||| "
        f"LogProbability= {hyp.log_probability:.4f} Length= {hyp.length} ||| {hyp.score(args.lenpen):.6f}\n"
        for sentence in read_generated(args.generated)
        for hyp in sorted(sentence.hypotheses, key=lambda hyp: -hyp.score(args.lenpen))
    ]
    with writing(args.output) as file:
        file.writelines(lines)
    print(f"{len(lines)} hypotheses\n{args.output}")
