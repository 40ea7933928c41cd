"""A faster drop-in replacement for fairseq's single-model beam search; other searches are left to fairseq.

B sentences, k hypotheses (rows) for each, R = B·k; S source positions, V target words, T target positions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models import BaseFairseqModel
from fairseq.search import BeamSearch, PrefixConstrainedBeamSearch
from fairseq.sequence_generator import EnsembleModel, SequenceGenerator, SequenceGeneratorWithAlignment
from torch import Tensor

from fairseq_plugins.common.model import TranslationModel
from fairseq_plugins.common.output_layer import has_plain_softmax, with_candidate_output, with_part
from fairseq_plugins.cpu.packing import BatchPacking, Packing, with_packing
from fairseq_plugins.search.beam_search import BeamState, TokenRules
from fairseq_plugins.search.ensemble import Ensemble, FairseqDecoding
from fairseq_plugins.search.graphs import GraphCache
from fairseq_plugins.vocabulary.candidates import Candidates, numbers_among

logger = logging.getLogger(__name__)


class FastBeamSearch(SequenceGenerator):
    """fairseq's generator; beam search with one model it does itself, and all else as fairseq does.

    Args:
        models: the ensemble.
        tgt_dict: target words.
        packing: of the models' weights; by default in float32.
        programs: what compiles the steps of this plugin's decoders, if they are to be compiled.
        word_penalty: added to the log-probability of each word but the end (Gehring et al. 2016, section 4.4), in nats.
        candidates: the words that a batch may need; by default all.  Those that the caller forces (prefixes,
            constraints) are candidates too.
        options: fairseq's.

    Raises:
        ValueError: an option that needs the whole vocabulary, with candidates.
    """

    def __init__(
        self,
        models: Sequence[BaseFairseqModel] | EnsembleModel,
        tgt_dict: Dictionary,
        packing: Packing | None = None,
        programs: GraphCache | None = None,
        word_penalty: float = 0.0,
        candidates: Candidates | None = None,
        **options: Any,
    ) -> None:
        models = list(models.models) if isinstance(models, EnsembleModel) else models
        super().__init__(Ensemble(models, word_penalty, tgt_dict.eos()), tgt_dict, **options)
        self.model.eos = self.eos
        self.packing = packing or Packing()
        self.programs = programs
        self.word_penalty = word_penalty
        self.candidates = candidates
        if programs and not (self._is_plain() and isinstance(self.model.single_model, TranslationModel)):
            logger.warning("steps are not compiled: that is for plain beam search with one model of this plugin")
        if candidates and self.lm_model is not None:
            raise ValueError("--candidates does not go with --lm-path: a language model scores the whole vocabulary")
        if candidates and self.eos != tgt_dict.eos():
            raise ValueError("candidates go with the dictionary's own end of sentences alone")
        if candidates and isinstance(self.search, PrefixConstrainedBeamSearch):
            raise ValueError("--candidates does not go with prefix_allowed_tokens_fn, whose words are not known before")

    def _is_plain(self) -> bool:
        """Whether this is beam search over the softmax of one model's logits; all else is left to fairseq's generator.

        That is: ensembles, sampling, diverse beams, constraints, language models, n-grams that are not repeated,
        outputs as long as their source, models without state or encoder, and probabilities of a model's own making.
        """
        return (
            type(self.search) is BeamSearch
            and self.model.models_size == 1
            and self.lm_model is None
            and self.repeat_ngram_blocker is None
            and not self.match_source_len
            and self.model.has_encoder()
            and self.model.has_incremental_states()
            and has_plain_softmax(self.model.single_model)
        )

    def _generate(
        self,
        sample: dict[str, Any],
        prefix_tokens: Tensor | None = None,
        constraints: Tensor | None = None,
        bos_token: int | None = None,
    ) -> list[list[dict[str, Tensor]]]:
        """As fairseq's.

        Raises:
            ValueError: there are too few candidates to choose from.
            RuntimeError: a sentence has no translation.
        """
        net_input = sample["net_input"]
        source = net_input["src_tokens"]
        if not len(source):
            return []
        # fairseq's hub moves the batch alone
        prefix_tokens, constraints = (
            each if each is None else each.to(source.device) for each in (prefix_tokens, constraints)
        )
        words = None
        if self.candidates is not None:
            words = self._words(source, prefix_tokens, constraints, bos_token)
        with self.packing.for_batch() as packing:
            if constraints is None and self._is_plain():
                return self._beam_search(packing, net_input, prefix_tokens, bos_token, words)
            return self._search_of_fairseq(packing, words, sample, prefix_tokens, constraints, bos_token)

    def _beam_search(
        self,
        packing: BatchPacking,
        net_input: dict[str, Any],
        prefix: Tensor | None,
        bos: int | None,
        words: Tensor | None,
    ) -> list[list[dict[str, Tensor]]]:
        """This plugin's search."""
        source, model = net_input["src_tokens"], self.model.single_model
        rules = TokenRules.of(self, source, prefix, bos, words)
        sentences, steps = len(source), len(rules.forced)
        with ExitStack() as stack:
            stack.enter_context(torch.cuda.device_of(source))
            if self.programs is not None and self.programs.can_run(model, source, steps):
                beams, step = stack.enter_context(self.programs.batch(model, self.begin, source, rules, packing))
            else:
                # Rows of a sentence are alike in the first step; but a prefix may end it there, with k copies.
                beams = self.begin(net_input, rules, rows=1 if prefix is None else self.beam_size, packing=packing)
                step = beams.begin_and_step
            made = run_search(beams, step, sentences, steps)
            found = beams.hypotheses(made, self.len_penalty if self.normalize_scores else 0)[:sentences]
        if not all(found):
            raise RuntimeError(
                "a sentence has no translation: all words are forbidden, or their scores are not numbers"
            )
        for hypothesis in chain(*found):
            hypothesis["attention"] = hypothesis["attention"][: source.size(1)]  # it may have been padded
        return found

    def begin(
        self,
        net_input: dict[str, Any],
        rules: TokenRules,
        capacity: int | None = None,
        rows: int | None = None,
        packing: BatchPacking | None = None,
    ) -> BeamState:
        """Encode a batch.

        Args:
            net_input: the batch.
            rules: of the batch.
            capacity: as of `StepwiseDecoding`.
            rows: as of `BeamState`; by default k.
            packing: packed weights of the batch.
        """
        model: Any = self.model.single_model
        k, source = self.beam_size, net_input["src_tokens"]
        if isinstance(model, TranslationModel):
            encoded = with_packing(model.encoder, packing).forward_torchscript(net_input)
            in_place = source.device.type == "cpu" and capacity is None  # where memory of that size is slow
            return BeamState(
                model.decoder.start(encoded, k, capacity, rules.words, packing), rules, rows or k, in_place
            )
        (encoded,) = self.model.forward_encoder(net_input)
        if rules.words is not None:
            model = with_candidate_output(model, rules.words, packing)
        return BeamState(FairseqDecoding(model, encoded, source, k), rules, rows=k)

    def last_steps(self, source: Tensor, longest: int) -> Tensor:
        """The step in which all hypotheses of a sentence end, (B,): as in fairseq the same for the whole batch.

        Args:
            source: (B, S).
            longest: the last step of the search.
        """
        return torch.full((len(source),), longest, device=source.device)

    def _search_of_fairseq(
        self,
        packing: BatchPacking,
        words: Tensor | None,
        sample: dict[str, Any],
        prefix: Tensor | None,
        constraints: Tensor | None,
        bos: int | None,
    ) -> list[list[dict[str, Tensor]]]:
        """fairseq's search with packed weights, and among candidates, (V,), if there are any.

        It runs in a twin of this generator, which numbers words by their places among the candidates.
        """
        models = list(self.model.models)
        if words is not None:
            models = [with_candidate_output(model, words, packing) for model in models]
        models = [with_packing(model, packing) if isinstance(model, TranslationModel) else model for model in models]
        twin = with_part(self, "model", Ensemble(models, self.word_penalty, self.eos, words))
        if words is not None:
            twin.vocab_size = len(words)
            if self.token_indices_to_suppress is not None:
                twin.token_indices_to_suppress = numbers_among(self.token_indices_to_suppress, words)
            if prefix is not None:
                prefix = numbers_among(prefix, words)
            if constraints is not None:  # their count comes first, and zero, which stays zero, ends each
                constraints = torch.cat([constraints[:, :1], numbers_among(constraints[:, 1:], words)], dim=1)
            if bos is not None:
                bos = int(numbers_among(torch.tensor(bos), words))
        found: list[list[dict[str, Tensor]]] = SequenceGenerator._generate(twin, sample, prefix, constraints, bos)
        if words is not None:
            for hypothesis in chain(*found):
                hypothesis["tokens"] = words[hypothesis["tokens"]]
        return found

    def _words(self, source: Tensor, prefix: Tensor | None, constraints: Tensor | None, bos: int | None) -> Tensor:
        """The candidates of a batch, and what is forced upon it, (V,), in the dictionary's order."""
        assert self.candidates is not None
        first = torch.tensor(self.eos if bos is None else bos)
        constrained = None if constraints is None else constraints[:, 1:]
        words = self.candidates.words(source, first, prefix, constrained, self.token_indices_to_suppress)
        # Sampling at its k best, other searches at twice as many words as there are beams and never at padding.
        needed = self.beam_size + 1
        if not self._is_plain():
            needed = max(2 * self.beam_size + 1, getattr(self.search, "sampling_topk", 0))
        if len(words) < min(needed, len(self.candidates.always)):
            raise ValueError(
                f"this search (a beam of {self.beam_size}) needs {needed} candidates and a batch has only {len(words)}"
                ": raise --frequent-candidates"
            )
        return words


class FastBeamSearchWithAlignment(SequenceGeneratorWithAlignment, FastBeamSearch):
    """The same with the alignments of ``--print-alignment``."""

    def generate(self, models: Any, sample: dict[str, Any], **options: Any) -> list[list[dict[str, Tensor]]]:
        """As fairseq's, which aligns no batch without sentences."""
        return super().generate(models, sample, **options) if len(sample["net_input"]["src_tokens"]) else []


def run_search(beams: BeamState, step: Callable[[], None], sentences: int, steps: int) -> int:
    """Make steps until all sentences have finished, and return the number of steps.

    Finished sentences are dropped, unless the state is fixed.  A GPU's numbers are read one step late, so that neither
    side waits; there sentences are dropped when at least half of them can be.

    Args:
        beams: before its first step.
        step: makes one.
        sentences: number of real (not padding) sentences.
        steps: the most; in the last one all hypotheses end.
    """
    every, look = steps_between_looks(beams.position.device), None
    late, share = (0, 1) if every == 1 else (1, 2)
    for number in range(1, steps):
        step()
        if number % every == 0:
            look = copy_to_host_async(beams.finished[:sentences])
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


def copy_to_host_async(numbers: Tensor) -> Callable[[], list[Any]]:
    """Start an asynchronous copy of numbers of any shape to the host; call the result to get the values."""
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
