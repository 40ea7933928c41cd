"""Translate one sentence and draw the attention of each decoder layer (ConvS2S, appendix C).

If DATA is own-data's folder, plot-attention finds the model, tokenizer and subwords in it, and the sentence is plain
text.
"""

from __future__ import annotations

import math
import os
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fairseq_plugins
from fairseq_plugins.cli.arguments import add_user_dir, import_user_dir, positive
from fairseq_plugins.cli.figure import add_picture, fonts_for, new_figure, save
from fairseq_plugins.cli.own_data.folder import SETTINGS, find_model
from fairseq_plugins.cli.own_data.preparation import source_segmenter
from fairseq_plugins.cli.parallel_text import Line, segmenter
from fairseq_plugins.common.files import naming_file_in_errors, refuse_input_as_output

if TYPE_CHECKING:
    from fairseq.models import BaseFairseqModel
    from fairseq.tasks import FairseqTask
    from torch import Tensor, nn

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
        help="subword-nmt codes, which split the words of the sentence",
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
    """Translate one sentence and draw its attention."""
    data, path = args.data, args.path
    segment: Line | None = None
    if (Path(data) / SETTINGS).exists():
        if args.bpe_codes is not None:
            raise ValueError(f"--bpe-codes: not allowed, because own-data saved subwords in {data}; remove the option")
        folder, model = find_model(Path(data), args.arch)
        data, path, segment = str(folder.binary), path or model / "checkpoint_best.pt", source_segmenter(folder)
    elif args.arch is not None:
        raise ValueError(f"--arch: {data} is not own-data's folder; use --path")
    for file in filter(None, (path, args.bpe_codes)):
        if not file.is_file():
            raise ValueError(f"{file}: file not found; give an existing one")
        refuse_input_as_output(args.output, [file])
    if not Path(data.split(os.pathsep)[0]).is_dir():
        raise ValueError(f"{data}: folder not found; give an existing one")
    if path is None:
        raise ValueError(f"--path: missing, and {data} is not own-data's folder; give a checkpoint")
    if args.bpe_codes is not None:
        segment = segmenter(args.bpe_codes)
    fairseq_plugins.install()
    import_user_dir(args.user_dir)
    with naming_file_in_errors(path, "cannot translate"):
        task, model = load(path, data)
        source, target, layers = search(task, model, segment(args.input) if segment else args.input, args.beam)
    if args.layers is not None:
        layers = choose(layers, args.layers)
    draw(source, target, layers, args.output)
    print(f"{' '.join(source)}\n{' '.join(target)}\n{args.output}")


def load(path: Path, data: str) -> tuple[FairseqTask, BaseFairseqModel]:
    """Load a translation model and its task."""
    from fairseq import checkpoint_utils
    from fairseq.models import FairseqEncoderDecoderModel

    load_models = checkpoint_utils.load_model_ensemble_and_task
    (model,), _, task = load_models([str(path)], arg_overrides={"data": data})
    if not isinstance(model, FairseqEncoderDecoderModel):
        raise ValueError(f"{path}: expected an encoder-decoder, got a {type(model).__name__}; give a translation model")
    return task, model


def search(
    task: FairseqTask, model: BaseFairseqModel, sentence: str, beam: int
) -> tuple[list[str], list[str], dict[str, Tensor]]:
    """Find the best translation of a sentence.

    Returns:
        source tokens, target tokens, and the attention of each layer, by the layer's name.  Attention has a row per
            source token and a column per target token.  If no attention layer is found, the only entry is the attention
            that the model reports.
    """
    from fairseq.sequence_generator import SequenceGenerator

    dictionary = task.source_dictionary
    tokens = dictionary.encode_line(sentence, add_if_not_exist=False).long()
    if unknown := [word for word in sentence.split() if dictionary.index(word) == dictionary.unk()]:
        print(
            f"warning: --input: words unknown to the model: {' '.join(unknown)}; tokenise and segment the sentence "
            "like the training text, see --bpe-codes",
            file=sys.stderr,
        )
    if len(tokens) < 2:  # the end-of-sentence token is the only token
        raise ValueError("--input: the sentence is empty; give at least one word")
    longest = model.max_positions()[0]
    if len(tokens) > longest:
        raise ValueError(
            f"--input: the sentence has {len(tokens)} tokens, the model reads at most {longest}; shorten it"
        )
    dataset = task.build_dataset_for_inference([tokens], [len(tokens)])
    sample = dataset.collater([dataset[0]])
    # The model is not prepared for inference, because the preparation would switch off its attention. fairseq's plain
    # generator does not prepare models.
    generator = task.build_generator([model], Namespace(beam=beam), seq_gen_cls=SequenceGenerator)
    found = task.inference_step(generator, [model], sample)[0]
    if not found or not found[0]["positional_scores"].isfinite().all():
        raise ValueError("--path: the model finds no translation with finite scores; use another checkpoint")
    best = found[0]
    layers = {f"layer {number}": a for number, a in attention_by_layer(model, sample, best["tokens"]).items()}
    if not layers:
        if best["attention"].numel() == 0:
            raise ValueError("--path: the model reports no attention; use another checkpoint")
        layers = {"attention": best["attention"]}
    target = [task.target_dictionary[token] for token in best["tokens"].tolist()]
    return [dictionary[token] for token in tokens.tolist()], target, layers


def attention_by_layer(model: BaseFairseqModel, sample: dict[str, Any], target: Tensor) -> dict[int, Tensor]:
    """Decode a given translation of one sentence and record the attention of the layers.

    Args:
        model: an encoder-decoder in eval mode, not prepared for inference.
        sample: a batch with only this sentence, in the form that fairseq's generators read.
        target: tokens of the translation with the end-of-sentence token, (T,).

    Returns:
        attention (S, T) of each layer that attends to the source, averaged over heads.  Keys are the layers' numbers,
            from 1.  The dictionary is empty if no attention layer is found.
    """
    import torch

    found: dict[int, Tensor] = {}
    with ExitStack() as hooks, torch.no_grad():
        for number, module in _attending(model.decoder):

            def keep(module: Any, inputs: tuple[Any, ...], output: Any, number: int = number) -> None:
                weights = module.weights(*inputs) if hasattr(module, "weights") else output[1]
                # fairseq's Transformer returns each head's attention, (heads, 1, T, S), for one layer, and the mean
                # over heads, (1, T, S), for the other layers.
                found[number] = weights.float().view(-1, *weights.shape[-2:]).mean(dim=0).t()

            hooks.callback(module.register_forward_hook(keep).remove)
        # The decoder's input starts with the end-of-sentence token, as fairseq expects.
        previous = target.roll(1).unsqueeze(0)
        model(**sample["net_input"], prev_output_tokens=previous)
    return found


def _attending(decoder: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    """Yield the modules that attend to the source, with the numbers of their layers."""
    from fairseq.models.fconv import AttentionLayer
    from fairseq.modules import MultiheadAttention

    from fairseq_plugins.common.model import IncrementalDecoder

    if isinstance(decoder, IncrementalDecoder):
        yield from decoder.attention_modules().items()
        return
    # In fairseq's fconv and Transformer, the name of an attention module contains the number of its layer.
    for name, module in decoder.named_modules():
        if isinstance(module, AttentionLayer) or (
            isinstance(module, MultiheadAttention) and module.encoder_decoder_attention
        ):
            number = re.search(r"\d+", name)
            yield (int(number[0]) + 1 if number else 1), module


def choose(layers: dict[str, Tensor], numbers: Sequence[int]) -> dict[str, Tensor]:
    """Return the attention of the chosen layers."""
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
        # Only the leftmost and the lowest panels show the tokens.
        panel.tick_params(labelleft=number % columns == 0, labelbottom=number + columns >= len(layers))
    for panel in panels:
        panel.remove()
    figure.supxlabel("translation", fontsize="medium")
    figure.supylabel("source", fontsize="medium")
    figure.colorbar(image, ax=figure.axes, label="attention")
    save(figure, output)
