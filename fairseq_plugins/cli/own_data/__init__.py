"""``fairseq-plugins own-data``: from two text files to translations."""
