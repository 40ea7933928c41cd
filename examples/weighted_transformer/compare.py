#!/usr/bin/env python3
"""Train the Weighted Transformer and fairseq's Transformer of the same sizes, and compare them.

``compare.py DATA_BIN OUT --reference TEXT`` reads binary data and the target text of the test part, and writes all
results to the folder OUT.  The script first trains each model briefly with each learning rate and attention dropout of
a grid.  The script then trains each model for 16 000 updates with each seed, and with the setting of the grid that
gave this model the lowest validation loss.  Run the same command again to resume: it skips finished trainings and
continues stopped ones.  ``table.md`` and ``curves.png`` are updated after each training.

Words after ``--`` are options of fairseq-train that override the recipe.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fairseq import checkpoint_utils
from sacrebleu.metrics import BLEU, CHRF

import fairseq_plugins
from fairseq_plugins.cli.generated import lines_of, read_generated
from fairseq_plugins.cli.parallel_text import writing
from fairseq_plugins.cli.plot_branches import holds_logits
from fairseq_plugins.cli.plot_loss import Point, draw, read_curve

sys.path.append(str(Path(__file__).resolve().parents[1]))  # folder of modules that several examples share
from recorded_settings import refuse_other_settings

fairseq_plugins.install()

USER_DIR = Path(__file__).resolve().parents[2] / "user_dir"
MODELS = {
    "transformer": ["--arch", "transformer", "--share-all-embeddings", "--criterion", "label_smoothed_cross_entropy"],
    "weighted_transformer": [
        "--arch", "weighted_transformer", "--criterion", "weighted_label_smoothed_cross_entropy",
    ],
}  # fmt: skip
RECIPE = """--encoder-layers 2 --decoder-layers 2 --encoder-embed-dim 128 --encoder-ffn-embed-dim 512
    --encoder-attention-heads 8 --decoder-attention-heads 8 --dropout 0.1 --label-smoothing 0.1
    --optimizer simplex_adam --lr-scheduler weighted_inverse_sqrt --warmup-updates 400
    --branch-lr-scale 0.1 --branch-warmup-updates 40 --max-tokens 2000 --max-update 16000
    --validate-interval-updates 200 --save-interval-updates 200 --keep-interval-updates 1
    --no-epoch-checkpoints --log-format json --log-interval 100 --num-workers 0"""


class Cell(NamedTuple):
    """A training."""

    model: str
    rate: float
    attention_dropout: float
    seed: int
    updates: int | None  # None: the recipe's number of updates

    def __str__(self) -> str:
        name = f"{self.model}-rate{self.rate}-attention{self.attention_dropout}-seed{self.seed}"
        return name if self.updates is None else f"{name}-updates{self.updates}"


def fairseq(command: str, *options: object, log: Path) -> None:
    """Run one of fairseq's commands with one thread, and append its output to ``log``."""
    words = [sys.executable, "-W", "ignore", "-m", f"fairseq_cli.{command}", *map(str, options)]
    with log.open("a", encoding="utf-8") as file:
        result = subprocess.run(
            words, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
        )
    if result.returncode:
        sys.exit(f"fairseq-{command} failed; see {log}")


def run(cell: Cell, args: argparse.Namespace) -> dict[str, Any]:
    """Return the result of a training, which runs now if it has no result yet.

    The result of a training has the validation losses.  If the training is complete (``cell.updates`` is None), the
    best checkpoint also translates the test part, and the result has BLEU and chrF.
    """
    folder = args.out / str(cell)
    result = folder / "result.json"
    if not result.exists():
        folder.mkdir(parents=True, exist_ok=True)
        scale = ["--lr-scale", cell.rate, "--attention-dropout", cell.attention_dropout, "--seed", cell.seed]
        options = [args.data, "--user-dir", USER_DIR, "--save-dir", folder, *MODELS[cell.model], *RECIPE.split()]
        end = [] if cell.updates is None else ["--max-update", cell.updates]
        fairseq("train", *options, *scale, *args.options, *end, log=folder / "train.log")
        best = folder / "checkpoint_best.pt"
        found = {"curve": read_curve(folder / "train.log"), "weak": weak_branches(best)}
        if cell.updates is None:
            decoding = ["--user-dir", USER_DIR, "--path", best, "--beam", 5, "--max-tokens", 3000, "--remove-bpe"]
            if args.tokenizer:  # fairseq's tokenizers need the languages
                source, target = next(args.data.glob("test.*-*.*.bin")).name.split(".")[1].split("-")
                decoding += ["--tokenizer", args.tokenizer, "--source-lang", source, "--target-lang", target]
            fairseq("generate", args.data, *decoding, "--results-path", folder, log=folder / "generate.log")
            found |= score(folder / "generate-test.txt", args.reference)
        with writing(result) as file:
            file.write(json.dumps(found))
        print(f"{cell}: validation loss {best_loss(found)[1]:.3f}", flush=True)
    return json.loads(result.read_text())


def score(generated: Path, reference: Path) -> dict[str, float]:
    """Return BLEU and chrF of the output of fairseq-generate."""
    sentences = read_generated([generated])
    texts, expected = [each.hypotheses[0].text for each in sentences], [lines_of(reference, sentences)]
    return {"bleu": BLEU().corpus_score(texts, expected).score, "chrf": CHRF().corpus_score(texts, expected).score}


def weak_branches(checkpoint: Path) -> list[int]:
    """Return how many values of κ and α are below a tenth of their mean, and how many values there are."""
    state = checkpoint_utils.load_checkpoint_to_cpu(str(checkpoint))
    vectors = [value.float() for name, value in state["model"].items() if ".kappa." in name or ".alpha." in name]
    points = [value.softmax(0) for value in vectors] if holds_logits(state) else vectors
    weights = [value * len(value) for value in points]
    flat = torch.cat(weights) if weights else torch.empty(0)
    return [int((flat < 0.1).sum()), flat.numel()]


def best_loss(found: dict[str, Any]) -> tuple[int, float]:
    """Return the number of updates and the loss of the best validation."""
    return min(((updates, loss) for updates, loss, _ in found["curve"]), key=lambda point: point[1])


def updates_until(loss: float, found: dict[str, Any]) -> int | None:
    """Return the number of updates at the first validation that reaches this loss."""
    return next((updates for updates, reached, _ in found["curve"] if reached <= loss), None)


def write(out: Path, results: dict[Cell, dict[str, Any]]) -> None:
    """Write the tables and the picture of the results so far."""
    grid = {cell: found for cell, found in results.items() if cell.updates is not None}
    final = {cell: found for cell, found in results.items() if cell.updates is None}
    lines = ["| | rate | attention dropout | updates | validation loss |", "|---" * 5 + "|"]
    for cell, found in sorted(grid.items()):
        settings = f"`{cell.model}` | {cell.rate} | {cell.attention_dropout} | {cell.updates}"
        lines.append(f"| {settings} | {best_loss(found)[1]:.3f} |")
    lines.append("")
    lines.append(
        "| | seed | best validation loss | updates until the best loss "
        "| updates until the loss is as low as the Transformer's best | BLEU | chrF | κ, α below 0.1/M |"
    )
    lines.append("|---" * 8 + "|")
    goals = {cell.seed: best_loss(found)[1] for cell, found in final.items() if cell.model == "transformer"}
    for cell, found in sorted(final.items()):
        updates, loss = best_loss(found)
        reached = updates_until(goals[cell.seed], found) if cell.seed in goals else None
        scores = f"{found['bleu']:.1f} | {found['chrf']:.1f} | {found['weak'][0]} of {found['weak'][1]}"
        lines.append(f"| `{cell.model}` | {cell.seed} | {loss:.3f} | {updates} | {reached or '-'} | {scores} |")
    (out / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if final:
        curves: dict[str, list[list[Point]]] = {}
        for cell, found in final.items():
            curves.setdefault(cell.model, []).append([Point(*point) for point in found["curve"]])
        draw(curves, out / "curves.png")


def main() -> None:
    own, given = sys.argv[1:], []
    if "--" in own:
        own, given = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="output of fairseq-preprocess --joined-dictionary")
    parser.add_argument("out", type=Path, help="folder for all results")
    parser.add_argument("--reference", type=Path, required=True, help="target text of the test part")
    parser.add_argument(
        "--tokenizer",
        help="fairseq's name of the text's tokenizer, such as moses; translations are detokenised before scoring",
    )
    parser.add_argument(
        "--rates",
        type=float,
        nargs="+",
        default=[0.7, 1.0, 1.4],
        help="values of --lr-scale in the grid (default: 0.7 1 1.4)",
    )
    parser.add_argument(
        "--attention-dropouts",
        type=float,
        nargs="+",
        default=[0.0, 0.1],
        help="values of --attention-dropout in the grid (default: 0 0.1)",
    )
    parser.add_argument(
        "--grid-updates", type=int, default=1600, help="updates of each training of the grid (default: 1600)"
    )
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=[1, 2, 3],
        help="random seeds; the grid uses the first one (default: 1 2 3)",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="number of parallel trainings, each with one thread (default: 1)"
    )
    args = parser.parse_args(own)
    args.options = given
    # The reference and the test part are read only after the trainings; this check finds a missing file early.
    if not args.reference.is_file():
        parser.error(f"--reference: {args.reference} is not a file; give the target text of the test part")
    if not any(args.data.glob("test.*.bin")):
        parser.error(f"DATA_BIN: {args.data} has no test part; run fairseq-preprocess with --testpref")
    args.out.mkdir(parents=True, exist_ok=True)
    # A later call may have other rates, dropouts and seeds, because each training has its own folder.
    shared = {"data": args.data.resolve(), "reference": args.reference.resolve(), "tokenizer": args.tokenizer}
    shared["options"] = shlex.join(given)
    made = chain(args.out.glob("*/result.json"), args.out.glob("*/checkpoint*.pt"))
    try:
        refuse_other_settings(args.out / "shared.json", shared, made)
    except ValueError as error:
        parser.error(str(error))

    results: dict[Cell, dict[str, Any]] = {}

    def run_all(cells: list[Cell]) -> None:
        with ThreadPoolExecutor(args.jobs) as pool:
            for cell, found in zip(cells, pool.map(lambda cell: run(cell, args), cells), strict=True):
                results[cell] = found
                write(args.out, results)

    grid = [
        Cell(*cell, args.seeds[0], args.grid_updates) for cell in product(MODELS, args.rates, args.attention_dropouts)
    ]
    run_all(grid)
    best = {cell.model: cell for cell in sorted(grid, key=lambda cell: best_loss(results[cell])[1], reverse=True)}
    run_all([best[model]._replace(seed=seed, updates=None) for seed, model in product(args.seeds, MODELS)])
    print((args.out / "table.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
