"""Translation models for fairseq: `fairseq_plugins.registration` makes them known to it, this alone does nothing."""

__version__ = "0.1.0"
