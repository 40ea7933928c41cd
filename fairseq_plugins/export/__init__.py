"""Models as programs that need neither fairseq nor torch."""
