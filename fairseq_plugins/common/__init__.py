"""What all families share: base classes, decode-time state, embeddings, options; the equations' plain torch."""
