"""Export of models as ONNX programs, and `translate`, the program that runs them without fairseq and torch."""
