"""Repairs of fairseq's searches: alignments, blocked n-grams, blank lines, generators."""

from __future__ import annotations

import copy
import math
import re
from itertools import chain, compress
from typing import Any

import torch
from fairseq import utils
from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.sequence_generator import SequenceGeneratorWithAlignment
from fairseq.sequence_scorer import SequenceScorer
from fairseq.tasks import FairseqTask
from fairseq.tasks.translation import TranslationTask
from torch import Tensor

from fairseq_plugins.repairs.refusals import refuse
from fairseq_plugins.repairs.translating import takes_hard_alignments
from fairseq_plugins.repairs.wrapping import wrap
from fairseq_plugins.vocabulary.unknown_words import keep_source_words


def align_incomplete_beams() -> None:
    """Align each hypothesis with its own copy of the source, as fairseq does with a beam of one.

    fairseq's ``--print-alignment`` raises an IndexError if a sentence has fewer finished hypotheses than the beam.  No
    probe is needed: complete beams get the same alignments.
    """
    prepare = SequenceGeneratorWithAlignment._prepare_batch_for_alignment

    @wrap(SequenceGeneratorWithAlignment, "generate")
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
            hypothesis["alignment"] = self.extract_alignment(*(part.cpu() for part in parts), self.pad, self.eos)
        return found


def blocks_in_a_buffer(size: int) -> bool:
    """Probe: whether ``5 6 5`` in a longer buffer blocks a second 6."""
    block = NGramRepeatBlock(size, use_extension=False)
    scores = block(torch.tensor([[5, 6, 5, 1, 1]]), torch.zeros(1, 8), bsz=1, beam_size=1, step=2)
    return bool(scores[0, 6] == float("-inf"))


def block_repeated_ngrams() -> None:
    """Apply ``--no-repeat-ngram-size`` only to the tokens of a hypothesis, and also for n = 1.

    Without its CUDA extension, fairseq also compares with the padding at the end of the generator's buffer.
    """
    if all(map(blocks_in_a_buffer, (1, 2))):
        return
    find = NGramRepeatBlock._no_repeat_ngram

    @wrap(NGramRepeatBlock, "_no_repeat_ngram")
    def _no_repeat_ngram(self: Any, tokens: Tensor, lprobs: Tensor, bsz: int, beam_size: int, step: int) -> Tensor:
        if self.no_repeat_ngram_size == 1:
            others = lprobs.scatter(1, tokens[:, 1 : step + 1], -math.inf)  # the first token is not a word
            # A given prefix may repeat a word and allow no other.
            return lprobs.where(others.isneginf().all(dim=1, keepdim=True), others)
        return find(self, tokens[:, : step + 1], lprobs, bsz, beam_size, step)


def build_generators() -> None:
    """Check options of a search, refuse a language model with other words, and keep source words for ``--replace-unk``.

    fairseq accepts a language model with another dictionary (``dict.txt``) of the same size.  No probe is needed: other
    searches are built as before.
    """
    build = FairseqTask.build_generator
    replaces = not takes_hard_alignments(utils.replace_unk)

    @wrap(FairseqTask, "build_generator")
    def build_generator(self: Any, models: Any, args: Any, *more: Any, **others: Any) -> Any:
        words = len(self.target_dictionary or ())
        refuse("python", getattr(self, "cfg", None), args, {"task": type(self), "words": words or None})
        language_model = (others.get("extra_gen_cls_kwargs") or {}).get("lm_model")
        if language_model is not None and language_model.decoder.dictionary != self.target_dictionary:
            raise ValueError(
                "--lm-path: the language model's dict.txt differs from the target dictionary; use an equal one"
            )
        generator = build(self, models, args, *more, **others)
        # --score-reference builds a scorer, which does not translate.
        if replaces and getattr(args, "replace_unk", None) is not None and not getattr(args, "score_reference", False):
            keep_source_words(self, generator, getattr(getattr(self, "cfg", None), "attention_offset", 0))
        return generator


def leave_blank_lines_blank() -> None:
    """Translate a blank line to a blank line, as exported folders do, unless the caller forces words.

    A model that was trained without blank lines invents a word for a blank line.  Sentencepiece pieces of white space
    are not words.  No probe is needed: every search runs until the model ends the sentence.
    """
    translate = TranslationTask.inference_step

    @wrap(TranslationTask, "inference_step")
    def inference_step(
        self: Any,
        generator: Any,
        models: Any,
        sample: dict[str, Any],
        prefix_tokens: Tensor | None = None,
        constraints: Tensor | None = None,
    ) -> Any:
        found = translate(self, generator, models, sample, prefix_tokens, constraints)
        if prefix_tokens is None and not isinstance(generator, SequenceScorer):
            pad, rows = self.source_dictionary.pad(), sample["net_input"]["src_tokens"].tolist()
            sources = ([self.source_dictionary[token] for token in row if token != pad] for row in rows)
            blank = torch.tensor([is_blank(words[:-1]) for words in sources])  # without the end of the sentence
            if constraints is not None:
                blank &= constraints[:, 0].eq(0).cpu()  # the first entry is the number of constraints
            for hypotheses in compress(found, blank.tolist()):
                for hypothesis in hypotheses:
                    remove_words(hypothesis, self.target_dictionary.eos())
        return found


def is_blank(words: list[str]) -> bool:
    """Return whether a source has no words; pieces and bytes of sentencepiece may be white space."""
    text = bytearray()
    for word in words:
        if byte := re.fullmatch("<0x([0-9A-F]{2})>", word):
            text.append(int(byte[1], 16))
        elif word.strip("\u2581"):
            return False
    return not text.decode(errors="replace").strip()


def remove_words(hypothesis: dict[str, Any], eos: int) -> None:
    """Remove all words of a hypothesis; the end-of-sentence token remains, with score 0."""
    attention, alignment = hypothesis.get("attention"), hypothesis.get("alignment")
    hypothesis["tokens"] = hypothesis["tokens"].new_tensor([eos])
    hypothesis["score"] = torch.zeros(())
    hypothesis["positional_scores"] = hypothesis["positional_scores"].new_zeros(1)
    if isinstance(attention, Tensor) and attention.dim() == 2:  # (source tokens, target tokens)
        hypothesis["attention"] = attention[:, :1]
    if isinstance(alignment, list):
        del alignment[1:]
