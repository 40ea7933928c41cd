"""Export to ONNX, and the script that translates without fairseq and PyTorch."""
