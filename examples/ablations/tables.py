"""The models (cells) of the papers' ablation tables, each as a set of changes to its family's ``config/FAMILY.yaml``.

A cell that occurs in several tables is trained once.  In a cell, W stands for the width of the layers.
"""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

__all__ = ["FAMILIES", "Family"]

Cell = dict[str, dict[str, Any]]


class Family(NamedTuple):
    """The ablation experiments of one model family.

    Attributes:
        cells: the changed options of each cell (a model to train), by the cell's name.
        tables: the names of the cells in each table, by the table's title.
    """

    cells: dict[str, Cell]
    tables: dict[str, list[str]]


def model(**options: Any) -> Cell:
    return {"model": options}


def layers(kernel: int, number: int) -> str:
    return f"[(W, {kernel})] * {number}"


def attend(*numbers: int) -> Cell:
    """Return the options of a model with attention only in the given decoder layers, which are numbered from 1 to 5."""
    return model(decoder_attention=str([number in numbers for number in range(1, 6)]))


ATTENDING = [(1, 2, 3, 4), (1, 2, 3), (1, 2), (1, 3, 5), (1,), (2,), (3,), (4,), (5,)]
KERNELS = (3, 5, 7)

# Section 5.4. "base" has 13 encoder layers of kernel 3 and 5 decoder layers of kernel 5.
CONVS2S = Family(
    cells={
        "base": {},
        "no-source-positions": model(no_encoder_positional_embeddings=True),
        "no-target-positions": model(no_decoder_positional_embeddings=True),
        "no-positions": model(no_encoder_positional_embeddings=True, no_decoder_positional_embeddings=True),
        **{f"attention-{'-'.join(map(str, numbers))}": attend(*numbers) for numbers in ATTENDING},
        **{
            f"encoder-kernel{kernel}-layers{number}": model(encoder_layers=layers(kernel, number))
            for kernel, number in product(KERNELS, (1, 3, 5, 9, 13))
            if (kernel, number) != (3, 13) and (number >= 5 or kernel == 3)
        },
        **{
            f"decoder-kernel{kernel}-layers{number}": model(decoder_layers=layers(kernel, number))
            for kernel, number in product(KERNELS, (1, 3, 5, 7))
            if (kernel, number) != (5, 5) and (number >= 3 or kernel == 5)
        },
    },
    tables={
        "Table 4: position embeddings": ["base", "no-source-positions", "no-target-positions", "no-positions"],
        "Table 5: decoder layers with attention": ["base"]
        + [f"attention-{'-'.join(map(str, numbers))}" for numbers in ATTENDING],
        "Table 7: kernel and depth of the encoder": [
            "base" if (kernel, number) == (3, 13) else f"encoder-kernel{kernel}-layers{number}"
            for kernel, number in product(KERNELS, (5, 9, 13))
        ],
        "Table 8: kernel and depth of the decoder": [
            "base" if (kernel, number) == (5, 5) else f"decoder-kernel{kernel}-layers{number}"
            for kernel, number in product(KERNELS, (3, 5, 7))
        ],
        "Figure 2: depth of the encoder": [*(f"encoder-kernel3-layers{number}" for number in (1, 3, 5, 9)), "base"],
        "Figure 2: depth of the decoder": [
            "base" if number == 5 else f"decoder-kernel5-layers{number}" for number in (1, 3, 5, 7)
        ],
    },
)


def transformer(number: int = 2, heads: int = 8) -> Cell:
    """Return the options of fairseq's Transformer with the Weighted Transformer's sizes and learning rates."""
    side = {"embed_dim": "W", "ffn_embed_dim": "4W", "layers": number, "attention_heads": heads}
    return {
        "model": {"_name": "transformer", "share_all_embeddings": True, "encoder": side, "decoder": side},
        "criterion": {"_name": "label_smoothed_cross_entropy"},
        "lr_scheduler": {"encoder_embed_dim": "W", "encoder_layers": number},
    }


def weighted(number: int = 2, heads: int = 8, **options: Any) -> Cell:
    sizes = {"encoder_embed_dim": "W", "encoder_ffn_embed_dim": "4W", "encoder_layers": number}
    return {
        "model": {"_name": "weighted_transformer", "encoder_attention_heads": heads, **sizes, **options},
        "criterion": {"_name": "weighted_label_smoothed_cross_entropy"},
    }


DEPTHS_OF_TABLE_2 = (2, 4, 6, 8)

WEIGHTED_TRANSFORMER = Family(
    cells={
        **{f"transformer-layers{number}": transformer(number) for number in DEPTHS_OF_TABLE_2},
        **{f"weighted-layers{number}": weighted(number) for number in DEPTHS_OF_TABLE_2},
        **{f"transformer-heads{heads}": transformer(heads=heads) for heads in (4, 16)},
        **{f"weighted-heads{heads}": weighted(heads=heads) for heads in (4, 16)},
        "softmax": weighted(branch_constraint="softmax"),
        **{weights: weighted(branch_weights=weights) for weights in ("uniform", "random", "resampled")},
        **{f"gate-top{kept}": weighted(branch_gating_topk=kept) for kept in (1, 2, 4)},
    },
    tables={
        "Table 2: compared with the Transformer": [
            f"{kind}-layers{number}" for number in DEPTHS_OF_TABLE_2 for kind in ("transformer", "weighted")
        ],
        "Number of heads and branches": [
            f"{kind}-{sizes}" for sizes in ("heads4", "layers2", "heads16") for kind in ("transformer", "weighted")
        ],
        "Table 3 and sections 3, 4.4, 4.5: κ and α in training": [
            *("weighted-layers2", "softmax", "uniform", "random", "resampled", "gate-top1", "gate-top2", "gate-top4"),
        ],
    },
)


def stacks(attention: int, aggregation: int, **options: Any) -> Cell:
    return model(encoder_layers=layers(3, attention), aggregation_layers=layers(3, aggregation), **options)


DEPTHS = (1, 3, 6, 9)
AGGREGATION_DEPTHS = (0, 1, 2, 3, 5)  # 0 layers: the encoder only averages the embeddings

CONV_ENCODER = Family(
    cells={
        "pooling": model(encoder_type="pooling"),
        "pooling-no-positions": model(encoder_type="pooling", no_encoder_positional_embeddings=True),
        "lstm": model(encoder_type="lstm"),
        "lstm-positions": model(encoder_type="lstm", encoder_lstm_positional_embeddings=True),
        "bilstm": model(encoder_type="bilstm"),
        "bilstm-positions": model(encoder_type="bilstm", encoder_lstm_positional_embeddings=True),
        "bilstm-layers2": model(encoder_type="bilstm", encoder_lstm_layers=2),
        "one-stack": model(single_stack=True),
        "no-positions": model(no_encoder_positional_embeddings=True),
        "stacks-1-1": stacks(1, 1),
        "stacks-1-1-no-positions": stacks(1, 1, no_encoder_positional_embeddings=True),
        "stacks-8-4": stacks(8, 4),
        "stacks-15-5": stacks(15, 5),
        **{f"stacks-{depth}-3": stacks(depth, 3) for depth in DEPTHS},
        **{f"stacks-{depth}-3-no-residual": stacks(depth, 3, no_residual=True) for depth in DEPTHS},
        **{f"stacks-6-{depth}": stacks(6, depth) for depth in AGGREGATION_DEPTHS},
    },
    tables={
        "Table 1: encoders": [
            *("lstm-positions", "lstm", "bilstm-positions", "bilstm", "bilstm-layers2"),
            *("pooling", "pooling-no-positions", "stacks-1-1", "stacks-1-1-no-positions"),
            *("stacks-6-3", "no-positions", "one-stack", "stacks-8-4", "stacks-15-5"),
        ],
        "Figure 2: depth of CNN-a, with and without residual connections": [
            f"stacks-{depth}-3{end}" for depth in DEPTHS for end in ("", "-no-residual")
        ],
        "Figure 2: depth of CNN-c": [f"stacks-6-{depth}" for depth in AGGREGATION_DEPTHS],
    },
)

FAMILIES = {"convs2s": CONVS2S, "weighted_transformer": WEIGHTED_TRANSFORMER, "conv_encoder": CONV_ENCODER}
