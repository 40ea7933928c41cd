"""Beam search on tensors, a generator and CUDA graphs that run it, and the `translation_fast` task."""

from fairseq_plugins.search.generator import FastBeamSearch
from fairseq_plugins.search.task import TranslationFastTask

__all__ = ["FastBeamSearch", "TranslationFastTask"]
