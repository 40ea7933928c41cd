"""fairseq's searches: sentences of a batch, alignments, and options that are for other searches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.search import DiverseBeamSearch, LexicallyConstrainedBeamSearch
from fairseq.sequence_generator import SequenceGeneratorWithAlignment
from torch import Tensor

from fairseq_plugins.compat.wrapping import in_place_of, raises

__all__ = [
    "align_the_hypotheses_that_there_are",
    "count_groups_by_their_place_in_the_batch",
    "refuse_what_no_search_does",
    "refuse_without_constraints",
]


def takes_numbers_of_the_data_for_places(search: DiverseBeamSearch) -> bool:
    """Probe: whether ``search`` fails for a batch of the sentence that is the second one of the data."""
    sentence = torch.tensor([1])
    try:
        for step in range(2):
            search.step(step, torch.zeros(1, 2, 5), torch.zeros(1, 2, step), torch.zeros(2, step + 1), sentence)
    except IndexError:
        return True
    return False


def count_groups_by_their_place_in_the_batch() -> None:
    """``--diverse-beam-groups`` fails: what its groups have in common is looked for at a sentence's number in the data.

    It is found at the sentence's place in the first step, when all are there.  And a hypothesis that has ended is gone
    on with, as it never is by other searches, which have others in reserve.
    """
    if not takes_numbers_of_the_data_for_places(DiverseBeamSearch(Dictionary(), 2, 0.5)):
        return
    make = DiverseBeamSearch.step

    @in_place_of(DiverseBeamSearch, "step")
    def make_step(
        self: Any, step: int, lprobs: Tensor, scores: Tensor, prev_output_tokens: Tensor, original_batch_idxs: Tensor
    ) -> Any:
        if step == 0:
            self.sentences = original_batch_idxs
        else:
            ended = prev_output_tokens[:, -1].eq(self.eos).view(len(lprobs), -1, 1)
            lprobs = lprobs.masked_fill(ended, -torch.inf)
        places = original_batch_idxs.unsqueeze(1).eq(self.sentences).int().argmax(dim=1)
        return make(self, step, lprobs, scores, prev_output_tokens, places)


def aligns_the_whole_beam(prepare: Callable[..., Any]) -> bool:
    """Probe: whether ``prepare`` repeats a source twice where a beam of two has one hypothesis."""
    net_input = {"src_tokens": torch.tensor([[4, 2]]), "src_lengths": torch.tensor([2])}
    generator = SimpleNamespace(beam_size=2, pad=1, eos=2, left_pad_target=False)
    source, *_ = prepare(generator, {"net_input": net_input}, [[{"tokens": torch.tensor([4, 2])}]])
    return len(source) == 2


def align_the_hypotheses_that_there_are() -> None:
    """``--print-alignment`` fails by an IndexError where a sentence has fewer finished hypotheses than the beam.

    Here each hypothesis is aligned with its own copy of the source, as fairseq does it for a beam of one.
    """
    prepare = SequenceGeneratorWithAlignment._prepare_batch_for_alignment
    if not aligns_the_whole_beam(prepare):
        return

    @in_place_of(SequenceGeneratorWithAlignment, "generate")
    @torch.no_grad()
    def generate(self: Any, models: Any, sample: dict[str, Any], **options: Any) -> list[list[dict[str, Any]]]:
        found: list[list[dict[str, Any]]] = super(SequenceGeneratorWithAlignment, self)._generate(sample, **options)
        hypotheses = [*chain(*found)]
        if not hypotheses:
            return found
        net_input, single = sample["net_input"], copy.copy(self)
        single.beam_size = 1
        owners = torch.tensor([place for place, beam in enumerate(found) for _ in beam])
        copies = {name: net_input[name][owners.to(net_input[name].device)] for name in ("src_tokens", "src_lengths")}
        source, lengths, previous, target = prepare(single, {"net_input": copies}, [[each] for each in hypotheses])
        if any(getattr(model, "full_context_alignment", False) for model in self.model.models):
            attention = self.model.forward_align(source, lengths, previous)
        else:
            attention = [hypothesis["attention"].transpose(1, 0) for hypothesis in hypotheses]
        for hypothesis, *parts in zip(hypotheses, attention, source, target, strict=True):
            on_cpu = (part.cpu() for part in parts)
            hypothesis["alignment"] = self.extract_alignment(*on_cpu, self.pad, self.eos)
        return found


def cannot_do_without(init: Callable[..., None]) -> bool:
    """Probe: whether ``init`` fails, without a reason, where there are no constraints."""
    with suppress(ValueError):  # with one
        return raises(TypeError, init, LexicallyConstrainedBeamSearch(Dictionary(), "ordered"), None, 1)
    return False


def refuse_without_constraints() -> None:
    """``--constraints`` wants constraints, which ``fairseq-generate`` has none of."""
    init = LexicallyConstrainedBeamSearch.init_constraints
    if not cannot_do_without(init):
        return

    @in_place_of(LexicallyConstrainedBeamSearch, "init_constraints")
    def init_constraints(self: Any, batch_constraints: Tensor | None, beam_size: int) -> None:
        if batch_constraints is None:
            raise ValueError(
                "--constraints: these sentences have none; fairseq-interactive reads them behind each line, after a "
                "tab, and from Python they are inference_step_args={'constraints': ...}"
            )
        init(self, batch_constraints, beam_size)


def refuse_what_no_search_does(args: Any) -> None:
    """``--print-step`` and ``--retain-iter-history`` fail at the first translation: only models that refine theirs have
    steps, whose tasks make other generators.  And a beam of none fails in the shape of a tensor.

    There is nothing to probe: no generator of these tasks has them.
    """
    beam = getattr(args, "beam", 1)
    if not isinstance(beam, int) or beam < 1:
        raise ValueError(f"the beam must be a number from 1 on, not {beam!r}")
    for option in ("print_step", "retain_iter_history"):
        if getattr(args, option, False):
            name = f"--{option.replace('_', '-')}"
            raise ValueError(f"{name} is for models that refine a translation step by step (--task translation_lev)")
