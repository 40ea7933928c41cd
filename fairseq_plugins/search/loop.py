"""What the host does in a search: it asks for steps, and looks now and then whether sentences have finished."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fairseq_plugins.search.beam_search import Beams


def search_to_the_end(beams: Beams, step: Callable[[], None], sentences: int, steps: int) -> int:
    """Make steps until all sentences have finished; how many were made.

    Sentences that have finished leave, unless all have their places in memory.  A GPU's numbers are read a step after
    the look, so that neither waits for the other, and there it is worth while when half of them can leave.

    Args:
        beams: before its first step.
        step: makes one.
        sentences: how many of them are not only added to fill a shape.
        steps: the most; in the last one all hypotheses end.
    """
    every, look = steps_between_looks(beams.position.device), None
    late, share = (0, 1) if every == 1 else (1, 2)
    for number in range(1, steps):
        step()
        if number % every == 0:
            look = read_later(beams.finished[:sentences])
        if look is not None and number % every == late:
            finished = look()
            if all(finished):
                return number
            stay = [place for place, has_finished in enumerate(finished) if not has_finished]
            if not beams.fixed and len(stay) < len(finished) and share * len(stay) <= len(finished):
                sentences = len(stay)
                beams.keep(_without_gaps(stay, beams.position.device))
    step()
    return steps


def steps_between_looks(device: torch.device) -> int:
    """How many steps are made until the host looks at the device again."""
    return 1 if device.type == "cpu" else 4


def read_later(numbers: Tensor) -> Callable[[], list[Any]]:
    """What reads a device's numbers as they are now, of any shape; neither waits for the other until it is called."""
    if not numbers.is_cuda:
        return numbers.tolist
    copy = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    copy.copy_(numbers, non_blocking=True)
    event = torch.cuda.Event()
    event.record()

    def read() -> list[Any]:
        event.synchronize()
        return copy.tolist()

    return read


def _without_gaps(stay: list[int], device: torch.device) -> Tensor:
    """These places, in an order in which as few as can be change theirs: the last ones fill the gaps."""
    kept, last = set(stay), reversed(stay)
    places = torch.tensor([place if place in kept else next(last) for place in range(len(stay))])
    return (places if device.type == "cpu" else places.pin_memory()).to(device, non_blocking=True)
