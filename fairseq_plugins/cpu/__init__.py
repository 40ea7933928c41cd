"""Fast CPU versions of the products in the models' equations.

| file | functions | plain PyTorch version |
|---|---|---|
| `linear` | `linear`: oneDNN if it is faster than MKL, or packed weights | `F.linear` |
| `convolution` | `convolve_time_first`, `convolve_channels_first`: products of windows | `conv_tbc`, `conv1d` |
| `winograd` | `convolve`: width three, in pairs of outputs, for translation in float32 | `conv_tbc` |
| `block_diagonal` | `add_block_diagonal`: a product added in place | `batched` |
| `products`, `packing` | packed weights for products without gradients, in three precisions, and their cache | |

Each function checks device, type, size and gradient mode at every call.  It uses its plain PyTorch version on a
GPU, and wherever it has no faster one.  This package depends on no model, and leaves parameters and checkpoints
unchanged.
"""
