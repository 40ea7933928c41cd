"""Models as programs that need neither fairseq nor torch, and `translate`, which is copied beside them."""
