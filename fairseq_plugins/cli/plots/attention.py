"""``fairseq-plugins plot-attention``: what each decoder layer attends to in a translation (ConvS2S, appendix C)."""

from __future__ import annotations

import math
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from fairseq.models import BaseFairseqModel, FairseqEncoderDecoderModel
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks import FairseqTask
from torch import Tensor

import fairseq_plugins
from fairseq_plugins.cli.any_file import blaming
from fairseq_plugins.cli.arguments import add_user_dir, import_user_dir, positive, refuse_input_as_output
from fairseq_plugins.cli.own_data.parallel_text import segmenter
from fairseq_plugins.cli.plots.figure import add_picture, new_figure, save
from fairseq_plugins.cli.plots.layer_attention import attention_by_layer
from fairseq_plugins.common.subwords import bpe_symbol

LARGEST = 20  # inches of a picture, each of 150 dots


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("data", metavar="DATA_BIN", help="folder with the dictionaries that fairseq-preprocess wrote")
    parser.add_argument("--path", type=Path, required=True, metavar="FILE", help="checkpoint of the model")
    parser.add_argument("--input", required=True, metavar="TEXT", help="source sentence, tokenised as for training")
    add_picture(parser)
    add_user_dir(parser)
    parser.add_argument(
        "--bpe-codes",
        type=Path,
        metavar="FILE",
        help="subword-nmt codes to segment the sentence with (default: the file code beside DATA_BIN, as of own-data, "
        "where the model has subwords and the sentence no @@)",
    )
    parser.add_argument("--beam", type=positive, default=5, metavar="N", help="beam size (default: %(default)s)")
    parser.add_argument(
        "--layers", type=int, nargs="+", metavar="N", help="decoder layers to draw, from 1 (default: all that attend)"
    )


def run(args: Namespace) -> None:
    """Translate one sentence and draw its attention.

    Raises:
        ValueError: a file is missing, the sentence is empty or too long, matplotlib is not installed, or the model
            reports no attention, or none of a layer that is to be drawn.
    """
    fairseq_plugins.install()
    for file in (args.path, args.bpe_codes):
        if file is not None and not file.is_file():
            raise ValueError(f"there is no file {file}")
        if file is not None:
            refuse_input_as_output(args.output, [file])
    import_user_dir(args.user_dir)
    with blaming(args.path, "cannot translate"):
        load = checkpoint_utils.load_model_ensemble_and_task
        (model,), _, task = load([str(args.path)], arg_overrides={"data": args.data})
        if not isinstance(model, FairseqEncoderDecoderModel):
            raise ValueError(f"{args.path} holds a {type(model).__name__}, and no encoder-decoder")
        sentence = segmented(args.input, args.bpe_codes, Path(args.data), task.source_dictionary)
        source, target, layers = translate(task, model, sentence, args.beam)
    if args.layers is not None:
        layers = choose(layers, args.layers)
    draw(source, target, layers, args.output)
    print(f"{' '.join(source)}\n{' '.join(target)}\n{args.output}")


def segmented(sentence: str, codes: Path | None, data: Path, dictionary: Dictionary) -> str:
    """The sentence in subwords by these codes, or those beside the data where they are a model's of subwords.

    Raises:
        ValueError: the codes are none of subword-nmt.
    """
    beside = data.absolute().parent / "code"
    if codes is not None:
        return segmenter(codes)(sentence)
    if beside.is_file() and "@@" not in sentence and bpe_symbol(dictionary.symbols) == "subword_nmt":
        try:
            return segmenter(beside)(sentence)
        except ValueError as error:  # a file of that name, of whatever
            print(f"warning: {error}. The sentence is not segmented; see --bpe-codes.", file=sys.stderr)
    return sentence


def translate(
    task: FairseqTask, model: BaseFairseqModel, sentence: str, beam: int
) -> tuple[list[str], list[str], dict[str, Tensor]]:
    """Find the best translation of a sentence.

    Returns:
        source tokens, target tokens, and the attention of each layer (source tokens, target tokens), by its name; or
        that which the model reports, where its layers' are not known.
    """
    dictionary = task.source_dictionary
    tokens = dictionary.encode_line(sentence, add_if_not_exist=False).long()
    if unknown := [word for word in sentence.split() if dictionary.index(word) == dictionary.unk()]:
        print(
            f"warning: the model does not know {' '.join(unknown)}. Was the text that it was trained on tokenised and "
            "segmented as this sentence? See --bpe-codes.",
            file=sys.stderr,
        )
    if len(tokens) < 2:  # the end-of-sentence mark is one
        raise ValueError("the sentence is empty")
    longest = model.max_positions()[0]
    if len(tokens) > longest:
        raise ValueError(f"the sentence has {len(tokens)} tokens, and the model takes {longest}")
    dataset = task.build_dataset_for_inference([tokens], [len(tokens)])
    sample = dataset.collater([dataset[0]])
    # The model is not prepared for inference, which would switch its attention off; for the same reason the plain
    # generator, whatever the task would choose.
    generator = task.build_generator([model], Namespace(beam=beam), seq_gen_cls=SequenceGenerator)
    found = task.inference_step(generator, [model], sample)[0]
    if not found or not found[0]["positional_scores"].isfinite().all():
        raise ValueError("the model finds no translation: are all of its parameters numbers?")
    best = found[0]
    layers = {f"layer {number}": a for number, a in attention_by_layer(model, sample, best["tokens"]).items()}
    if not layers:
        if best["attention"].numel() == 0:
            raise ValueError("the model reports no attention")
        layers = {"attention": best["attention"]}
    return symbols(task.source_dictionary, tokens), symbols(task.target_dictionary, best["tokens"]), layers


def choose(layers: dict[str, Tensor], numbers: Sequence[int]) -> dict[str, Tensor]:
    """The attention of the layers with such numbers.

    Raises:
        ValueError: there is none of one of them.
    """
    names = [f"layer {number}" for number in numbers]
    if unknown := [name for name in names if name not in layers]:
        raise ValueError(f"cannot draw {', '.join(unknown)}: the model reports {', '.join(layers)}")
    return {name: layers[name] for name in names}


def symbols(dictionary: Dictionary, tokens: Tensor) -> list[str]:
    """What the tokens look like in text, the end-of-sentence mark included."""
    return [dictionary[token] for token in tokens.tolist()]


def draw(source: Sequence[str], target: Sequence[str], layers: dict[str, Tensor], output: Path) -> None:
    """A panel for each layer, source tokens downwards and target tokens from left to right, darker where it attends.

    Of sentences too long for a picture of a bearable size only every so many-th token is written.
    """
    columns = math.ceil(math.sqrt(len(layers)))
    rows = math.ceil(len(layers) / columns)
    sizes = 2 + columns * (0.3 + 0.18 * len(target)), 1.2 + rows * (0.3 + 0.18 * len(source))
    scale = min(1, LARGEST / max(sizes))
    figure = new_figure(*(scale * size for size in sizes))
    panels = figure.subplots(rows, columns, squeeze=False).flat
    strongest = max(float(attention.max()) for attention in layers.values())
    step = math.ceil(1 / scale)
    across, down = ((range(0, len(words), step), words[::step]) for words in (target, source))
    for number, ((name, attention), panel) in enumerate(zip(layers.items(), panels, strict=False)):
        image = panel.imshow(attention.cpu().numpy(), cmap="Greys", vmin=0, vmax=strongest)
        panel.set_title(name, fontsize="medium")
        panel.set_xticks(*across, rotation=90, fontsize="small", parse_math=False)
        panel.set_yticks(*down, fontsize="small", parse_math=False)
        # Words stand at the left and at the bottom of the grid.
        panel.tick_params(labelleft=number % columns == 0, labelbottom=number + columns >= len(layers))
    for panel in panels:
        panel.remove()
    figure.supxlabel("translation", fontsize="medium")
    figure.supylabel("source", fontsize="medium")
    figure.colorbar(image, ax=figure.axes, label="attention")
    save(figure, output)
