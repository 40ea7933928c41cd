"""Vocabulary selection (L'Hostis et al. 2016), and replacement of unknown words."""

from fairseq_plugins.vocabulary.candidates import Candidates

__all__ = ["Candidates"]
