"""Fast CPU versions of the products in the models' equations.

| file | functions | plain PyTorch version |
|---|---|---|
| `linear` | `linear`: a product by oneDNN where oneDNN is faster than MKL, or with packed weights | `F.linear` |
| `convolution` | `convolve_time_first`, `convolve_channels_first`: products of windows | `conv_tbc`, `conv1d` |
| `winograd` | `convolve`: kernel width three with fewer multiplications, for translation in float32 | `conv_tbc` |
| `block_diagonal` | `add_block_diagonal`: a block-diagonal product added in place | `batched` |
| `products`, `packing` | products with packed weights, without gradients, in three precisions; a weight cache | |

Each function checks device, type, size and gradient mode at every call.  On a GPU, and in all cases that the fast
version does not support, it uses its plain PyTorch version.  This package does not depend on any model.  It leaves
parameters and checkpoints unchanged.
"""
