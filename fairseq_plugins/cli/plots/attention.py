"""Translate one sentence and draw the attention of each decoder layer (ConvS2S, appendix C).

If DATA is own-data's folder, plot-attention finds the model, tokenizer and subwords in it, and the sentence is plain
text.
"""

from __future__ import annotations

import math
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import fairseq_plugins
from fairseq_plugins.cli.arguments import add_user_dir, import_user_dir, positive
from fairseq_plugins.cli.files import refuse_input_as_output
from fairseq_plugins.cli.own_data.folder import SETTINGS, find_model
from fairseq_plugins.cli.own_data.parallel_text import segmenter
from fairseq_plugins.cli.own_data.preparation import source_segmenter
from fairseq_plugins.cli.plots.figure import add_picture, fonts_for, new_figure, save

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = 20  # inches


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "data",
        metavar="DATA",
        help="own-data's folder, or a folder with dictionaries of fairseq-preprocess",
    )
    parser.add_argument(
        "--path", type=Path, metavar="FILE", help="checkpoint of the model (default: the best one in own-data's folder)"
    )
    parser.add_argument("--arch", help="with own-data's folder: the architecture, if several models were trained there")
    parser.add_argument(
        "--input",
        required=True,
        metavar="TEXT",
        help="source sentence: plain text if DATA is own-data's folder, otherwise tokenised like the training text",
    )
    add_picture(parser)
    add_user_dir(parser)
    parser.add_argument(
        "--bpe-codes",
        type=Path,
        metavar="FILE",
        help="subword-nmt codes for the sentence (default: the file 'code' beside DATA, if the model uses subwords and "
        "the sentence has no @@)",
    )
    parser.add_argument("--beam", type=positive, default=5, metavar="N", help="beam size (default: %(default)s)")
    parser.add_argument(
        "--layers",
        type=int,
        nargs="+",
        metavar="N",
        help="decoder layers to draw, counted from 1 (default: all layers with attention)",
    )


def run(args: Namespace) -> None:
    """Translate one sentence and draw its attention.

    Raises:
        ValueError: a file is missing, the sentence is empty or too long, matplotlib is not installed, or the model or a
            chosen layer has no attention.
    """
    data, path, segment = args.data, args.path, None
    if (Path(data) / SETTINGS).exists():
        if args.bpe_codes is not None:
            raise ValueError("--bpe-codes: not allowed with own-data's folder, which has its own; remove the option")
        folder, model = find_model(Path(data), args.arch)
        data, path, segment = str(folder.binary), path or model / "checkpoint_best.pt", source_segmenter(folder)
    elif args.arch is not None:
        raise ValueError(f"--arch: {data} is not own-data's folder; use --path")
    for file in (path, args.bpe_codes):
        if file is not None and not file.is_file():
            raise ValueError(f"{file}: file not found; give an existing one")
        if file is not None:
            refuse_input_as_output(args.output, [file])
    if not Path(data.split(os.pathsep)[0]).is_dir():
        raise ValueError(f"{data}: folder not found; give an existing one")
    if path is None:
        raise ValueError(f"--path: missing, and {data} is not own-data's folder; give a checkpoint")
    if args.bpe_codes is not None:
        segment = segmenter(args.bpe_codes)
    from fairseq_plugins.cli.plots.attended_translation import translate  # noqa: PLC0415  (importing fairseq takes seconds)

    fairseq_plugins.install()
    import_user_dir(args.user_dir)
    source, target, layers = translate(path, data, args.input, segment, args.beam)
    if args.layers is not None:
        layers = choose(layers, args.layers)
    draw(source, target, layers, args.output)
    print(f"{' '.join(source)}\n{' '.join(target)}\n{args.output}")


def choose(layers: dict[str, Tensor], numbers: Sequence[int]) -> dict[str, Tensor]:
    """Return the attention of the chosen layers.

    Raises:
        ValueError: a layer has no attention.
    """
    names = [f"layer {number}" for number in numbers]
    if unknown := [name for name in names if name not in layers]:
        raise ValueError(f"--layers: {', '.join(unknown)} not found; choose from {', '.join(layers)}")
    return {name: layers[name] for name in names}


def draw(source: Sequence[str], target: Sequence[str], layers: dict[str, Tensor], output: Path) -> None:
    """Draw one panel per layer: source tokens downwards, target tokens to the right, darker for more attention.

    If the picture would grow beyond `LARGEST`, only every n-th token has a label.
    """
    columns = math.ceil(math.sqrt(len(layers)))
    rows = math.ceil(len(layers) / columns)
    sizes = 2 + columns * (0.3 + 0.18 * len(target)), 1.2 + rows * (0.3 + 0.18 * len(source))
    scale = min(1, LARGEST / max(sizes))
    figure = new_figure(*(scale * size for size in sizes))
    panels = figure.subplots(rows, columns, squeeze=False).flat
    fonts = fonts_for("".join([*source, *target]))
    strongest = max(float(attention.max()) for attention in layers.values())
    step = math.ceil(1 / scale)
    across, down = ((range(0, len(words), step), words[::step]) for words in (target, source))
    for number, ((name, attention), panel) in enumerate(zip(layers.items(), panels, strict=False)):
        image = panel.imshow(attention.cpu().numpy(), cmap="Greys", vmin=0, vmax=strongest)
        panel.set_title(name, fontsize="medium")
        panel.set_xticks(*across, rotation=90, fontsize="small", fontfamily=fonts, parse_math=False)
        panel.set_yticks(*down, fontsize="small", fontfamily=fonts, parse_math=False)
        # Only panels at the left and at the bottom have words.
        panel.tick_params(labelleft=number % columns == 0, labelbottom=number + columns >= len(layers))
    for panel in panels:
        panel.remove()
    figure.supxlabel("translation", fontsize="medium")
    figure.supylabel("source", fontsize="medium")
    figure.colorbar(image, ax=figure.axes, label="attention")
    save(figure, output)
