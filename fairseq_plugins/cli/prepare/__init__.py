"""``fairseq-plugins prepare``: the data of the papers' experiments."""
