"""Building blocks of torch's and fairseq's modules; nothing here knows fairseq's registries."""
