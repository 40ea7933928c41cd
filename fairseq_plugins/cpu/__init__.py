"""Functions of the equations that choose the fastest form of a product on a CPU.

| file | functions | plain twin |
|---|---|---|
| `linear` | `linear`: through oneDNN where that is faster than MKL, or with packed weights | `F.linear` |
| `convolution` | `convolve_time_first`, `convolve_channels_first`: as products of windows | `conv_tbc`, `conv1d` |
| `winograd` | the same of width three, in pairs of outputs, to translate in float32 | `conv_tbc` |
| `block_diagonal` | `add_block_diagonal`: in place | `batched` |
| `products`, `packing` | weights laid out for products without gradients, in three precisions, and their cache | |

Each function looks at device, type, size and gradient whenever it is called, and computes its plain twin where it has
nothing faster, on a GPU always.  Nothing here knows a model; parameters and checkpoints stay as they are.
"""
