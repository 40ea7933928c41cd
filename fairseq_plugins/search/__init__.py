"""Beam search on tensors, the generator and CUDA graphs that run the search, and the `translation_fast` task."""

from fairseq_plugins.search.generator import FastBeamSearch
from fairseq_plugins.search.task import TranslationFastTask

__all__ = ["FastBeamSearch", "TranslationFastTask"]
