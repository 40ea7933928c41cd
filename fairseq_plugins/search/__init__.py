"""Beam search as tensors, in fairseq's interface, as CUDA graphs, and the task `translation_fast`."""

from fairseq_plugins.search.generator import FastBeamSearch
from fairseq_plugins.search.task import TranslationFastTask

__all__ = ["FastBeamSearch", "TranslationFastTask"]
