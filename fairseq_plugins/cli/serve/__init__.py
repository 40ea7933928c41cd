"""``fairseq-plugins serve``: the command, models, sentences and their batches, the HTTP API, and the page."""
