"""Export to ONNX, and the program that translates without fairseq and PyTorch."""
