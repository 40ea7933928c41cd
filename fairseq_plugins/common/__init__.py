"""Shared by all families: base classes, decode-time state, embeddings, options; the equations' plain torch."""
