"""Progress messages of a training in ``own-data``, made from fairseq's log."""

from __future__ import annotations

import math
import re
import sys
import time
from pathlib import Path
from typing import Any

from fairseq_plugins.cli.own_data.folder import METRICS
from fairseq_plugins.cli.plot_loss import records
from fairseq_plugins.common.options import flag

NOTHING_LEFT = "nothing is left to train"  # repairs/resuming.py logs this sentence
# Parts of fairseq's log messages at the end of a training, and the option that causes each message.  If --max-epoch
# ends the training, fairseq logs no such message.
ENDS = {
    "early stop since valid performance": "patience",
    "Stopping training due to num_updates": "max_update",
    "Stopping training due to cumulative_training_time": "stop_time_hours",
    "stopping training because current learning rate": "stop_min_lr",
}
SILENCE = 60  # minimum number of seconds between two messages about updates


class Progress:
    """Print the progress of a training on stderr, one line per validation.

    Args:
        usual: number of epochs after which the validation metric usually stops improving; infinity if unknown.
        chosen: all options of the training.
    """

    def __init__(self, usual: float, chosen: dict[str, Any]) -> None:
        self.chosen, self.end = chosen, "max_epoch"  # all options, and the name of the option that ends the training
        self.usual, self.patience = usual, chosen["patience"]
        self.epochs, self.updates = (
            chosen[name] if chosen[name] > 0 else math.inf for name in ("max_epoch", "max_update")
        )
        self.metric, self.sign = (
            chosen["best_checkpoint_metric"],
            -1 if chosen["maximize_best_checkpoint_metric"] else 1,
        )
        self.per_epoch = self.seconds = math.nan  # updates per epoch, seconds per update
        self.began: tuple[float, int] | None = None  # time and updates of the first record
        self.best, self.stale = math.inf, 0  # best value of the metric times `sign`, and number of later validations
        self.told = 0.0

    def see(self, line: str) -> None:
        """Read a line of fairseq's log (``--log-format json``)."""
        if too_long := re.search(r"(?<!\S)(\S+) samples have invalid sizes and will be skipped", line):
            self.tell(f"Skipped sentence pairs, too long for the model: {too_long[1]}.")
        resumed = re.search(r"Loaded checkpoint (.+) \(epoch \d+ @ (\d+) updates\)", line)
        # The base model of an adaptation is loaded from another folder.
        if resumed and Path(resumed[1]).parent == Path(self.chosen["save_dir"]):
            self.tell(f"Resumed after update {resumed[2]}.")
        self.end = next((option for text, option in ENDS.items() if text in line), self.end)
        if NOTHING_LEFT in line:
            self.tell(line.rpartition(" | ")[2].rstrip("\n"))
            self.end = ""
        if "done training in" in line and self.end:
            self.tell(f"Training ended by {flag(self.end)} {self.chosen[self.end]}.")
        for record in records(line):
            # In fairseq's log, "update" counts epochs, and "num_updates" counts updates.
            if {"update", "num_updates"} <= record.keys():
                self.see_updates(int(record["num_updates"]), record)
            elif {"valid_loss", f"valid_{self.metric}", "valid_num_updates"} <= record.keys():
                self.see_validation(int(record["valid_num_updates"]), record)

    def see_updates(self, done: int, record: dict[str, Any]) -> None:
        """Handle a log record of training updates."""
        epochs = float(record["update"])  # rounded
        if epochs < 0.01:
            return
        self.per_epoch = done / epochs
        if self.began is None:
            self.began = time.monotonic(), done
            return
        first = math.isnan(self.seconds)
        self.measure(done)
        if first:
            took = span(self.per_epoch * self.seconds)
            self.tell(f"One epoch has {self.per_epoch:.0f} updates and takes {took}{self.left(done)}.")
        elif time.monotonic() - self.told >= SILENCE:
            self.tell(f"epoch {record['epoch']}, update {done}{self.left(done)}")

    def see_validation(self, done: int, record: dict[str, Any]) -> None:
        """Handle a log record of a validation."""
        self.measure(done)
        loss, value = float(record["valid_loss"]), float(record[f"valid_{self.metric}"])
        best, before = float(record.get(f"valid_best_{self.metric}", value)), self.best
        self.best = min(self.best, self.sign * value, self.sign * best)
        # In fairseq, a value that equals the best value is not an improvement.
        self.stale = 0 if self.sign * value <= self.best < before else self.stale + 1
        digits = 2 if self.metric in ("chrf", "bleu") else 3
        name = METRICS.get(self.metric, self.metric)
        found = f"{loss:.3f}" if self.metric == "loss" else f"{loss:.3f}, {name} {value:.{digits}f}"
        compared = f"the best is {self.sign * self.best:.{digits}f}" if self.stale else "the best so far"
        self.tell(f"epoch {record['epoch']}, update {done}: validation loss {found}, {compared}{self.left(done)}")

    def measure(self, done: int) -> None:
        """Measure the seconds per update, including validation."""
        if self.began and done > self.began[1]:
            self.seconds = (time.monotonic() - self.began[0]) / (done - self.began[1])

    def left(self, done: int) -> str:
        """Estimate the remaining time from the usual number of epochs, the patience, --max-epoch and --max-update."""
        usual = max(self.usual - done / self.per_epoch, self.patience - self.stale) if self.patience > 0 else math.inf
        left = min(usual * self.per_epoch, self.epochs * self.per_epoch - done, self.updates - done) * self.seconds
        return f"; about {span(left)} left" if 0.5 < left < math.inf else ""

    def tell(self, text: str) -> None:
        """Print a line."""
        self.told = time.monotonic()
        print(text, file=sys.stderr, flush=True)


def span(seconds: float) -> str:
    """Format a time span, such as ``40 s``, ``7 min`` or ``3.5 hours``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} hours"


def counted(number: int, noun: str) -> str:
    """Return a number and its noun, which gets a plural ``s`` if needed."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
