"""fairseq's beam search without what is wasted in it, for one model; all other searches as fairseq does them.

B sentences, k hypotheses (rows) for each, R = B·k; S source positions, V target words, T target positions.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models import BaseFairseqModel, FairseqDecoder
from fairseq.models.transformer import TransformerModelBase
from fairseq.search import BeamSearch, PrefixConstrainedBeamSearch
from fairseq.sequence_generator import (
    EnsembleModel,
    SequenceGenerator,
    SequenceGeneratorWithAlignment,
)
from torch import Tensor

from fairseq_plugins.backends.cpu.packing import Packing
from fairseq_plugins.generation.beams import Beams, Rules
from fairseq_plugins.generation.candidates import Candidates
from fairseq_plugins.generation.ensemble import Ensemble, OtherDecoding
from fairseq_plugins.generation.programs import Look, Programs
from fairseq_plugins.models.incremental import IncrementalDecoder
from fairseq_plugins.models.output_layer import among

__all__ = ["FastBeamSearch", "FastBeamSearchWithAlignment"]

logger = logging.getLogger(__name__)

_SOFTMAX_OF_MODELS = (BaseFairseqModel.get_normalized_probs, TransformerModelBase.get_normalized_probs)


def steps_between_looks(device: torch.device) -> int:
    """How many steps are made until the host looks at the device again."""
    return 1 if device.type == "cpu" else 4


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
        programs: Programs | None = None,
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
        if programs and not (self._is_plain() and isinstance(self.model.single_model.decoder, IncrementalDecoder)):
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
            and _has_plain_softmax(self.model.single_model)
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
        is_plain = constraints is None and "src_tokens" in net_input and self._is_plain()
        if is_plain and not len(net_input["src_tokens"]):
            return []
        with self.packing.for_batch():
            words = None
            if self.candidates is not None:
                # Packed constraints begin with their number.
                forced = constraints[:, 1:] if constraints is not None else None
                first = torch.tensor(self.eos if bos_token is None else bos_token)
                words = self._words(net_input["src_tokens"], (forced, prefix_tokens, first))
            if is_plain:
                return self._beam_search(net_input, prefix_tokens, self.eos if bos_token is None else bos_token, words)
            if words is None:
                return super()._generate(sample, prefix_tokens, constraints, bos_token)
            if prefix_tokens is not None:
                prefix_tokens = _numbers(prefix_tokens, words)
            if constraints is not None:  # zero, which ends each, is a special symbol and stays zero
                constraints = torch.cat([constraints[:, :1], _numbers(constraints[:, 1:], words)], dim=1)
            if bos_token is not None:
                bos_token = int(_numbers(torch.tensor(bos_token), words))
            found = SequenceGenerator._generate(self._among(words), sample, prefix_tokens, constraints, bos_token)
            for hypothesis in chain(*found):
                hypothesis["tokens"] = words[hypothesis["tokens"]]
            return found

    def _beam_search(
        self, net_input: dict[str, Any], prefix: Tensor | None, bos: int, words: Tensor | None
    ) -> list[list[dict[str, Tensor]]]:
        source, model = net_input["src_tokens"], self.model.single_model
        longest = min(int(self.max_len_a * source.size(1) + self.max_len_b), self.max_len - 1)
        assert self.min_len <= longest, "min_len cannot be larger than max_len, please adjust these!"  # fairseq's words
        rules = self._rules(source, longest, prefix, bos, words)
        with ExitStack() as stack:
            stack.enter_context(torch.cuda.device_of(source))
            if self.programs is not None and self.programs.can_run(model, source, longest + 1):
                beams, step = stack.enter_context(self.programs.batch(model, self._begin, source, rules))
            else:
                # Rows of a sentence are alike in the first step; but a prefix may end it there, with k copies.
                beams = self._begin(net_input, rules, rows=1 if prefix is None else self.beam_size)
                step = beams.begin_and_step
            steps = self._run(beams, step, len(source), longest)
            found = beams.hypotheses(steps, self.len_penalty if self.normalize_scores else 0)[: len(source)]
        if not all(found):
            raise RuntimeError(
                "a sentence has no translation: all words are forbidden, or their scores are not numbers"
            )
        for hypothesis in chain(*found):
            hypothesis["attention"] = hypothesis["attention"][: source.size(1)]  # it may have been padded
        return found

    def _rules(self, source: Tensor, longest: int, prefix: Tensor | None, bos: int, words: Tensor | None) -> Rules:
        """fairseq's, and the penalty of words."""
        device, steps, first = source.device, longest + 1, 0
        forced = torch.full((steps, len(source)), -1, device=device)
        forced[longest] = self.eos
        if prefix is not None:
            # Until the longest prefix has ended fairseq suppresses no word, and no end, of any sentence.
            first = min(prefix.size(1), longest)
            own = prefix[:, :first].t()
            forced[:first] = _numbers(own.contiguous(), words).masked_fill(own == self.pad, -1)
        ruled = [self.pad, self.unk, self.eos]
        if self.token_indices_to_suppress is not None:
            ruled += _numbers(self.token_indices_to_suppress.to(device), words).tolist()
        penalties = torch.zeros(steps, len(ruled), dtype=torch.float32)
        penalties[:, 0], penalties[:, 1] = -torch.inf, -self.unk_penalty
        penalties[first:, 3:] = -torch.inf
        penalties[first : self.min_len, 2] = -torch.inf
        return Rules(
            ruled=torch.tensor(ruled, device=device),
            penalties=penalties.to(device),
            forced=forced,
            last=torch.full((1,), longest, device=device),
            words=words,
            beam=self.beam_size,
            word_penalty=self.word_penalty,
            temperature=self.temperature,
            eos=self.eos,
            bos=bos,
        )

    def _begin(
        self, net_input: dict[str, Any], rules: Rules, room: int | None = None, rows: int | None = None
    ) -> Beams:
        """Encode a batch.

        Args:
            net_input: the batch.
            rules: of the batch.
            room: as of `StepwiseDecoding`.
            rows: as of `Beams`; by default k.
        """
        model: Any = self.model.single_model
        (encoded,) = self.model.forward_encoder(net_input)
        k, fixed, source = self.beam_size, room is not None, net_input["src_tokens"]
        if isinstance(model.decoder, IncrementalDecoder):
            attends = source.size(1) if fixed and model.decoder.wants_attention else None
            in_place = source.device.type == "cpu" and not fixed  # where memory of that size is slow
            decoding = model.decoder.start(encoded, k, room, rules.words)
            return Beams(decoding, rules, rows or k, fixed=fixed, attends=attends, in_place=in_place)
        if rules.words is not None:
            model = among(model, rules.words)
        return Beams(OtherDecoding(model, encoded, len(source), k, source.device), rules, rows=k)

    def _run(self, beams: Beams, step: Callable[[], None], sentences: int, longest: int) -> int:
        """Search to the end; how many steps were made.

        Sentences that have finished leave, unless all have their places in memory.  A GPU's numbers are read a step
        after the look, so that neither waits for the other, and there it is worth while when half of them can leave.
        """
        every, look = steps_between_looks(beams.position.device), None
        late, share = (0, 1) if every == 1 else (1, 2)
        for number in range(1, longest + 1):
            step()
            if number % every == 0:
                look = Look(beams.finished[:sentences])
            if look is not None and number % every == late:
                finished = look.result()
                if all(finished):
                    return number
                stay = [place for place, has_finished in enumerate(finished) if not has_finished]
                if not beams.fixed and len(stay) < len(finished) and share * len(stay) <= len(finished):
                    sentences = len(stay)
                    beams.keep(_without_gaps(stay, beams.position.device))
        step()
        return longest + 1

    def _words(self, source: Tensor, forced: Sequence[Tensor | None]) -> Tensor:
        """The candidates of a batch, and what is forced upon it, (V,), in the dictionary's order."""
        assert self.candidates is not None
        mask = self.candidates.mask(source)
        for tokens in (*forced, self.token_indices_to_suppress):
            if tokens is not None:
                mask.index_fill_(0, tokens.flatten().to(mask.device), True)
        words = mask.nonzero().flatten()
        # Sampling at its k best, other searches at twice as many words as there are beams and never at padding.
        needed = self.beam_size + 1
        if not self._is_plain():
            needed = max(2 * self.beam_size + 1, getattr(self.search, "sampling_topk", 0))
        if len(words) < min(needed, len(mask)):
            raise ValueError(
                f"this search (--beam {self.beam_size}) needs {needed} candidates and a batch has only {len(words)}: "
                "raise --frequent-candidates"
            )
        return words

    def _among(self, words: Tensor) -> SequenceGenerator:
        """A twin for fairseq's searches, which knows words by their numbers among the candidates."""
        models = [among(model, words) for model in self.model.models]
        twin = copy.copy(self)
        twin._modules = {**self._modules, "model": Ensemble(models, self.word_penalty, self.eos, words)}
        twin.vocab_size = len(words)
        if self.token_indices_to_suppress is not None:
            twin.token_indices_to_suppress = _numbers(self.token_indices_to_suppress, words)
        return twin


class FastBeamSearchWithAlignment(SequenceGeneratorWithAlignment, FastBeamSearch):
    """The same with the alignments of ``--print-alignment``."""

    def generate(self, models: Any, sample: dict[str, Any], **options: Any) -> list[list[dict[str, Tensor]]]:
        """As fairseq's, which aligns no batch without sentences."""
        return super().generate(models, sample, **options) if len(sample["net_input"]["src_tokens"]) else []


def _numbers(tokens: Tensor, words: Tensor | None) -> Tensor:
    """Their numbers among the candidates, of which they are, if there are any."""
    return tokens if words is None else torch.searchsorted(words, tokens.to(words))


def _without_gaps(stay: list[int], device: torch.device) -> Tensor:
    """These places, in an order in which as few as can be change theirs: the last ones fill the gaps."""
    kept, last = set(stay), reversed(stay)
    places = torch.tensor([place if place in kept else next(last) for place in range(len(stay))])
    return (places if device.type == "cpu" else places.pin_memory()).to(device, non_blocking=True)


def _has_plain_softmax(model: BaseFairseqModel) -> bool:
    """Whether the model's probabilities are the softmax of what its decoder returns, by fairseq's own methods."""
    decoder = model.decoder
    return (
        decoder.adaptive_softmax is None
        and type(model).get_normalized_probs in _SOFTMAX_OF_MODELS
        and type(decoder).get_normalized_probs is FairseqDecoder.get_normalized_probs
        and type(decoder).get_normalized_probs_scriptable is FairseqDecoder.get_normalized_probs_scriptable
    )
