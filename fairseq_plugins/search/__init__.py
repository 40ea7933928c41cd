"""The `translation_fast` task, its fast beam search, and the CUDA graphs that run this search on a GPU."""

from fairseq_plugins.search.generator import FastBeamSearch
from fairseq_plugins.search.task import TranslationFastTask

__all__ = ["FastBeamSearch", "TranslationFastTask"]
