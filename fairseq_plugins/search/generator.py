"""A faster drop-in replacement for fairseq's generator; fairseq still runs all searches except plain beam search.

B sentences, k hypotheses (rows) per sentence, R = B·k; S source positions, V target words, T target positions.
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
from fairseq.sequence_generator import (
    EnsembleModel,
    EnsembleModelWithAlignment,
    SequenceGenerator,
    SequenceGeneratorWithAlignment,
)
from torch import Tensor

from fairseq_plugins.common.decoding import FairseqDecoding
from fairseq_plugins.common.model import TranslationModel
from fairseq_plugins.common.output_layer import has_plain_softmax, with_candidate_output, with_part
from fairseq_plugins.cpu.packing import BatchWeights, PackedWeightCache, with_batch_weights
from fairseq_plugins.search.beam_search import BeamState, TokenRules, penalise_words
from fairseq_plugins.search.graphs import GraphCache
from fairseq_plugins.vocabulary.candidates import Candidates, candidate_indices

logger = logging.getLogger(__name__)


class Ensemble(EnsembleModelWithAlignment):
    """fairseq's ensemble with a word penalty; if candidate words, (V,), are given, tokens are indices into them."""

    def __init__(
        self, models: Sequence[BaseFairseqModel], word_penalty: float, eos: int, words: Tensor | None = None
    ) -> None:
        super().__init__(models)
        self.word_penalty, self.eos, self.words = word_penalty, eos, words

    def forward_decoder(self, tokens: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Return the log-probabilities of the next tokens, (R, V), and the attention, for previous tokens, (R, T)."""
        tokens = tokens if self.words is None else self.words[tokens]
        lprobs, attention = super().forward_decoder(tokens, *args, **kwargs)
        penalise_words(lprobs, self.word_penalty, self.eos)
        return lprobs, attention


class FastBeamSearch(SequenceGenerator):
    """fairseq's generator with a faster beam search for one model; fairseq still runs other searches.

    Args:
        tgt_dict: target words.
        weight_cache: cache of packed weights; by default a new cache with precision float32.
        graphs: cache of compiled steps of this plugin's decoders; None to run steps without compilation.
        word_penalty: see `penalise_words`.
        candidates: table of candidate words, to which words of prefixes and constraints are added; None for all words.
        options: options of fairseq's generator.
    """

    def __init__(
        self,
        models: Sequence[BaseFairseqModel] | EnsembleModel,
        tgt_dict: Dictionary,
        weight_cache: PackedWeightCache | None = None,
        graphs: GraphCache | None = None,
        word_penalty: float = 0.0,
        candidates: Candidates | None = None,
        **options: Any,
    ) -> None:
        models = list(models.models) if isinstance(models, EnsembleModel) else models
        super().__init__(Ensemble(models, word_penalty, tgt_dict.eos()), tgt_dict, **options)
        self.model.eos = self.eos
        self.weight_cache = weight_cache or PackedWeightCache()
        self.graphs = graphs
        self.word_penalty = word_penalty
        self.candidates = candidates
        if graphs and not (self._is_plain_beam_search() and isinstance(self.model.single_model, TranslationModel)):
            logger.warning(
                "--compile-steps does nothing here: it needs plain beam search with one model of this plugin"
            )
        if candidates and self.lm_model is not None:
            raise ValueError(
                "--candidates cannot be used with --lm-path, which needs all words: drop --candidates or --lm-path"
            )
        if candidates and self.eos != tgt_dict.eos():
            raise ValueError("--candidates needs the dictionary's end-of-sentence token: do not pass another eos")
        if candidates and isinstance(self.search, PrefixConstrainedBeamSearch):
            raise ValueError(
                "--candidates cannot be used with prefix_allowed_tokens_fn, which needs all words: drop --candidates "
                "or prefix_allowed_tokens_fn"
            )

    def _is_plain_beam_search(self) -> bool:
        """Return whether this is plain beam search with one model whose probabilities are the softmax of its logits.

        fairseq's own search handles all other cases: ensembles, sampling, diverse beam search, constraints, language
        models, n-gram blocking, ``--match-source-len``, models without encoder or incremental state, and models that
        compute probabilities in another way.
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
        """Translate a batch; see fairseq's generator."""
        net_input = sample["net_input"]
        source = net_input["src_tokens"]
        # fairseq's hub interface does not move prefixes and constraints to the device.
        prefix_tokens, constraints = (
            each if each is None else each.to(source.device) for each in (prefix_tokens, constraints)
        )
        words = None
        if self.candidates is not None:
            words = self._candidate_words(source, prefix_tokens, constraints, bos_token)
        with self.weight_cache.for_batch() as batch_weights:
            if constraints is None and self._is_plain_beam_search():
                return self._beam_search(batch_weights, net_input, prefix_tokens, bos_token, words)
            return self._fairseq_search(batch_weights, words, sample, prefix_tokens, constraints, bos_token)

    def _beam_search(
        self,
        batch_weights: BatchWeights,
        net_input: dict[str, Any],
        prefix: Tensor | None,
        bos: int | None,
        words: Tensor | None,
    ) -> list[list[dict[str, Tensor]]]:
        """Translate a batch with this plugin's search."""
        source, model = net_input["src_tokens"], self.model.single_model
        rules = TokenRules.from_generator(self, source, prefix, bos, words)
        sentences, steps = len(source), len(rules.forced)
        with ExitStack() as stack:
            stack.enter_context(torch.cuda.device_of(source))
            if self.graphs is not None and self.graphs.supports(model, source, steps):
                state, step = stack.enter_context(self.graphs.search(model, self.begin, source, rules, batch_weights))
            else:
                # One row per sentence is enough for the first step, because k rows would be equal.
                # With a prefix, use k rows: for a prefix of only the end symbol, the search returns k equal hypotheses.
                state = self.begin(
                    net_input, rules, rows=1 if prefix is None else self.beam_size, batch_weights=batch_weights
                )
                step = state.prepare_and_step
            steps_made = run_search(state, step, sentences, steps)
            found = state.hypotheses(steps_made, self.len_penalty if self.normalize_scores else 0)[:sentences]
        if not all(found):
            missing = [place for place, each in enumerate(found) if not each]
            if rules.exclude_forced_words()[missing].any():
                raise RuntimeError(
                    "a sentence has no translation, because options exclude a word of its prefix, or its end symbol; "
                    "lower --unkpen, or give another prefix"
                )
            raise RuntimeError(
                "a sentence has no translation, because the model's scores are NaN or infinite; use another checkpoint "
                "or leave out --fp16"
            )
        for hypothesis in chain(*found):
            hypothesis["attention"] = hypothesis["attention"][: source.size(1)]  # without padding
        return found

    def begin(
        self,
        net_input: dict[str, Any],
        rules: TokenRules,
        capacity: int | None = None,
        rows: int | None = None,
        batch_weights: BatchWeights | None = None,
    ) -> BeamState:
        """Encode a batch, and return the state before the first step.

        ``rows`` is the number of rows per sentence in the first step: k by default, and always k for models of fairseq.
        For ``capacity`` see `StepwiseDecoding`.
        """
        model: Any = self.model.single_model
        k, source = self.beam_size, net_input["src_tokens"]
        if isinstance(model, TranslationModel):
            encoded = with_batch_weights(model.encoder, batch_weights).forward_torchscript(net_input)
            # On a CPU, a second tensor with the size of the logits takes time.
            in_place = source.device.type == "cpu" and capacity is None
            decoding = model.decoder.start(encoded, k, capacity, rules.words, batch_weights)
            return BeamState(decoding, rules, rows or k, in_place)
        (encoded,) = self.model.forward_encoder(net_input)
        if rules.words is not None:
            model = with_candidate_output(model, rules.words, batch_weights)
        return BeamState(FairseqDecoding(model, encoded, source, k), rules, rows=k)

    def last_steps(self, source: Tensor, longest: int) -> Tensor:
        """Return the last step of each sentence, in which its hypotheses are forced to end, (B,).

        As in fairseq, this is the last step of the search, the same for all sentences.  A subclass may force the
        hypotheses of a sentence to end in an earlier step.
        """
        return torch.full((len(source),), longest, device=source.device)

    def _fairseq_search(
        self,
        batch_weights: BatchWeights,
        words: Tensor | None,
        sample: dict[str, Any],
        prefix: Tensor | None,
        constraints: Tensor | None,
        bos: int | None,
    ) -> list[list[dict[str, Tensor]]]:
        """Translate a batch with fairseq's search and this plugin's packed weights, candidates and word penalty.

        The search runs in a copy of this generator.  If the candidates ``words``, (V,), are given, this search uses
        indices into ``words`` as tokens, and the results have the dictionary's indices.
        """
        models = list(self.model.models)
        if words is not None:
            models = [with_candidate_output(model, words, batch_weights) for model in models]
        models = [
            with_batch_weights(model, batch_weights) if isinstance(model, TranslationModel) else model
            for model in models
        ]
        generator = with_part(self, "model", Ensemble(models, self.word_penalty, self.eos, words))
        if words is not None:
            generator.vocab_size = len(words)
            if self.token_indices_to_suppress is not None:
                generator.token_indices_to_suppress = candidate_indices(self.token_indices_to_suppress, words)
            if prefix is not None:
                prefix = candidate_indices(prefix, words)
            if constraints is not None:
                # The first column is the number of constraints.  Index 0, which separates constraints, stays 0.
                constraints = torch.cat([constraints[:, :1], candidate_indices(constraints[:, 1:], words)], dim=1)
            if bos is not None:
                bos = int(candidate_indices(torch.tensor(bos), words))
        found: list[list[dict[str, Tensor]]] = SequenceGenerator._generate(generator, sample, prefix, constraints, bos)
        if words is not None:
            for hypothesis in chain(*found):
                hypothesis["tokens"] = words[hypothesis["tokens"]]
        return found

    def _candidate_words(
        self, source: Tensor, prefix: Tensor | None, constraints: Tensor | None, bos: int | None
    ) -> Tensor:
        """Return the candidate words of a batch, (V,), in the dictionary's order.

        The candidates include the words of prefixes, constraints and suppressed tokens.
        """
        assert self.candidates is not None
        first = torch.tensor(self.eos if bos is None else bos)
        constrained = None if constraints is None else constraints[:, 1:]
        words = self.candidates.words(source, first, prefix, constrained, self.token_indices_to_suppress)
        # The padding symbol is a candidate, but never part of a translation.  Therefore this plugin's search needs at
        # least k + 1 candidates, and fairseq's search needs at least 2k + 1.
        # Top-k sampling needs as many candidates as the number of words from which it samples.
        needed = self.beam_size + 1
        if not self._is_plain_beam_search():
            needed = max(2 * self.beam_size + 1, getattr(self.search, "sampling_topk", 0))
        if len(words) < min(needed, len(self.candidates.always)):
            raise ValueError(
                f"--candidates: a batch has {len(words)} candidate words, but a beam of {self.beam_size} "
                f"needs {needed}; raise --frequent-candidates"
            )
        return words


class FastBeamSearchWithAlignment(SequenceGeneratorWithAlignment, FastBeamSearch):
    """`FastBeamSearch` with the alignments of ``--print-alignment``."""


def run_search(state: BeamState, step: Callable[[], None], sentences: int, steps: int) -> int:
    """Make steps until all sentences have finished, and return the number of steps.

    Finished sentences are dropped, unless the state's tensors have fixed shapes.  On a GPU, the host reads
    `BeamState.finished` one step late, so that host and device do not wait for each other.  On a GPU, dropping
    sentences takes time, so they are dropped only when at least half of the sentences have finished.

    Args:
        state: state before the first step.
        step: function that makes a step.
        sentences: number of real (not padding) sentences.
        steps: maximum number of steps.
    """
    every, read = steps_between_reads(state.position.device), None
    late, share = (0, 1) if every == 1 else (1, 2)
    for number in range(1, steps):
        step()
        if number % every == 0:
            read = copy_to_host_async(state.finished[:sentences])
        if read is not None and number % every == late:
            finished = read()
            if all(finished):
                return number
            stay = [place for place, has_finished in enumerate(finished) if not has_finished]
            if not state.fixed and len(stay) < len(finished) and share * len(stay) <= len(finished):
                sentences = len(stay)
                state.keep(_fill_gaps(stay, state.position.device))
    step()
    return steps


def steps_between_reads(device: torch.device) -> int:
    """Return the number of steps after which the host reads `BeamState.finished` again."""
    return 1 if device.type == "cpu" else 4


def copy_to_host_async(numbers: Tensor) -> Callable[[], list[Any]]:
    """Start an asynchronous copy of a tensor to the host, and return a function that returns the copied values."""
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


def _fill_gaps(stay: list[int], device: torch.device) -> Tensor:
    """Return the indices of the n remaining sentences, in an order that moves as few sentences as possible.

    Remaining sentences with an index below n stay where they are.  The others replace finished sentences.
    """
    kept, last = set(stay), reversed(stay)
    places = torch.tensor([place if place in kept else next(last) for place in range(len(stay))])
    return (places if device.type == "cpu" else places.pin_memory()).to(device, non_blocking=True)
