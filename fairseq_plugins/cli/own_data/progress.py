"""Progress of a training, read from fairseq's log (``--log-format json``) and printed as one line per validation."""

from __future__ import annotations

import math
import re
import sys
import time
from typing import Any

from fairseq_plugins.cli.plot_loss import records

SILENCE = 60  # minimum of seconds between two messages about updates


class TrainingProgress:
    """Print the progress of a training on stderr.

    Args:
        usual: number of epochs after which validation usually stops improving; infinity if unknown.
        patience: ``--patience``; no limit unless positive.
        epochs: ``--max-epoch``; no limit unless positive.
        updates: ``--max-update``; no limit unless positive.
        metric: ``--best-checkpoint-metric``.
        larger: whether larger values of the metric are better.
    """

    def __init__(
        self, usual: float, patience: int, epochs: int, updates: int, metric: str = "loss", larger: bool = False
    ) -> None:
        self.metric, self.sign = metric, -1 if larger else 1
        self.usual, self.patience = usual, patience
        self.epochs, self.updates = (limit if limit > 0 else math.inf for limit in (epochs, updates))
        self.per_epoch = self.seconds = math.nan  # updates per epoch, seconds per update
        self.began: tuple[float, int] | None = None  # time and updates of the first record
        self.best, self.stale = math.inf, 0  # best metric times `sign`, and number of validations since then
        self.told = 0.0

    def see(self, line: str) -> None:
        """Read a line of the log."""
        if too_long := re.search(r"(?<!\S)(\S+) samples have invalid sizes and will be skipped", line):
            self.tell(f"Skipped sentence pairs, too long for the model: {too_long[1]}.")
        for record in records(line):
            # "update" counts epochs, and "num_updates" counts updates.
            if {"update", "num_updates"} <= record.keys():
                self.see_updates(int(record["num_updates"]), record)
            elif {"valid_loss", f"valid_{self.metric}", "valid_num_updates"} <= record.keys():
                self.see_validation(int(record["valid_num_updates"]), record)

    def see_updates(self, done: int, record: dict[str, Any]) -> None:
        """Handle a record of training."""
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
        """Handle a record of validation."""
        self.measure(done)
        loss, value = float(record["valid_loss"]), float(record[f"valid_{self.metric}"])
        best, before = float(record.get(f"valid_best_{self.metric}", value)), self.best
        self.best = min(self.best, self.sign * value, self.sign * best)
        # For fairseq, a validation that only equals the best one is not an improvement.
        self.stale = 0 if self.sign * value <= self.best < before else self.stale + 1
        found = f"{loss:.3f}" if self.metric == "loss" else f"{loss:.3f}, {self.metric} {value:.3f}"
        compared = f"the best is {self.sign * self.best:.3f}" if self.stale else "the best so far"
        self.tell(f"epoch {record['epoch']}, update {done}: validation loss {found}, {compared}{self.left(done)}")

    def measure(self, done: int) -> None:
        """Update the seconds per update, validation included."""
        if self.began and done > self.began[1]:
            self.seconds = (time.monotonic() - self.began[0]) / (done - self.began[1])

    def left(self, done: int) -> str:
        """Estimate the remaining time from the usual number of epochs; after these epochs, from the patience."""
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
