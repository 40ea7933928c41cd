"""``fairseq-plugins own-data``: train a model on two text files and translate with it."""
