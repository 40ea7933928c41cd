"""Fast CPU versions of matrix products, convolutions, dropout and a training loss.

| file | functions | plain PyTorch version |
|---|---|---|
| `linear` | `linear`: a product by oneDNN where oneDNN is faster than MKL, or with packed weights | `F.linear` |
| `linear` | `add_block_diagonal`: a block-diagonal product added in place | `batched` |
| `convolution` | `convolve_time_first`, `convolve_channels_first`: windows or pairs | `conv_tbc`, `conv1d` |
| `packing` | products with packed weights, without gradients, in three precisions; a weight cache | |
| `dropout_and_loss` | `dropout`, `label_smoothed_nll_loss` | `F.dropout`, fairseq's loss |

Each function checks device, type, size and gradient mode at every call.  On a GPU, and in all cases that the fast
version does not support, the function uses its plain PyTorch version.  This package does not depend on any model, and
leaves parameters and checkpoints unchanged.
"""
