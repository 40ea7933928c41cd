"""Building blocks in plain torch; nothing here knows fairseq's registries."""
