"""Export of models to ONNX, and the script `translate`, which runs exported models without fairseq and torch."""
