"""``fairseq-plugins serve``: the command, the server, its HTTP API, texts and their batches, and the page."""
