"""Fast CPU versions of matrix products, convolutions, dropout and a training loss.

- `linear`: `linear` computes `F.linear` by oneDNN where oneDNN is faster than MKL, with packed weights, or into reused
  memory.  `add_block_diagonal` computes `batched`, and adds the result in place.
- `convolution`: `convolve_time_first` computes `conv_tbc` as products of windows, or in pairs of outputs.
  Without gradients, `convolve_channels_first` computes `conv1d` as products of windows.
- `packing`: products with packed weights, without gradients, in three precisions; a weight cache.
- `dropout_and_loss`: `dropout` computes `F.dropout`, and `label_smoothed_nll_loss` computes fairseq's loss.

Each function checks device, type, size and gradient mode at every call.  On a GPU, and in all cases that the fast
version does not support, the function uses its plain PyTorch version.  This package does not depend on any model, and
leaves parameters and checkpoints unchanged.
"""
