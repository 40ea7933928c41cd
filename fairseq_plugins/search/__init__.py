"""Beam search on tensors, its generator for fairseq, its CUDA graphs, and the `translation_fast` task."""

from fairseq_plugins.search.generator import FastBeamSearch
from fairseq_plugins.search.task import TranslationFastTask

__all__ = ["FastBeamSearch", "TranslationFastTask"]
