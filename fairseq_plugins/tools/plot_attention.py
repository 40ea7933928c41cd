"""``fairseq-plugins plot-attention``: a picture of what a translation attends to, for any model that reports it."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from fairseq.checkpoint_utils import load_model_ensemble_and_task
from fairseq.data import Dictionary
from fairseq.models import BaseFairseqModel
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks import FairseqTask
from subword_nmt.apply_bpe import BPE
from torch import Tensor

from fairseq_plugins.tools.figure import new_figure

__all__ = ["add_arguments", "run"]


def add_arguments(parser: ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("data", metavar="DATA_BIN", help="folder with the dictionaries that fairseq-preprocess wrote")
    parser.add_argument("--path", type=Path, required=True, metavar="FILE", help="checkpoint of the model")
    parser.add_argument("--input", required=True, metavar="TEXT", help="source sentence, tokenised as for training")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="picture to write: .png, .pdf, .svg")
    parser.add_argument("--bpe-codes", type=Path, metavar="FILE", help="subword-nmt codes to segment the sentence with")
    parser.add_argument("--beam", type=int, default=5, metavar="N", help="beam size (default: %(default)s)")


def run(args: Namespace) -> None:
    """Translate one sentence and draw its attention.

    Raises:
        ValueError: a file is missing, the sentence is empty or too long, matplotlib is not installed, or the model
            reports no attention.
    """
    for file in (args.path, args.bpe_codes):
        if file is not None and not file.is_file():
            raise ValueError(f"{file} does not exist")
    sentence = args.input
    if args.bpe_codes is not None:
        with args.bpe_codes.open(encoding="utf-8") as codes:
            sentence = BPE(codes).process_line(sentence)
    models, _, task = load_model_ensemble_and_task([str(args.path)], arg_overrides={"data": args.data})
    source, target, attention = translate(task, models, sentence, args.beam)
    draw(source, target, attention, args.output)
    print(f"{' '.join(source)}\n{' '.join(target)}\n{args.output}")


def translate(
    task: FairseqTask, models: Sequence[BaseFairseqModel], sentence: str, beam: int
) -> tuple[list[str], list[str], Tensor]:
    """The tokens of a sentence, those of its best translation, and the attention (source tokens, target tokens)."""
    tokens = task.source_dictionary.encode_line(sentence, add_if_not_exist=False).long()
    if len(tokens) < 2:  # the end-of-sentence mark is one
        raise ValueError("the sentence is empty")
    longest = min(model.max_positions()[0] for model in models)
    if len(tokens) > longest:
        raise ValueError(f"the sentence has {len(tokens)} tokens, and the model takes {longest}")
    dataset = task.build_dataset_for_inference([tokens], [len(tokens)])
    # The models are not prepared for inference, which would switch their attention off; for the same reason the plain
    # generator, whatever the task would choose.
    generator = task.build_generator(models, Namespace(beam=beam), seq_gen_cls=SequenceGenerator)
    best = task.inference_step(generator, models, dataset.collater([dataset[0]]))[0][0]
    if best["attention"].numel() == 0:
        raise ValueError("the model reports no attention")
    return symbols(task.source_dictionary, tokens), symbols(task.target_dictionary, best["tokens"]), best["attention"]


def symbols(dictionary: Dictionary, tokens: Tensor) -> list[str]:
    """What the tokens look like in text, the end-of-sentence mark included."""
    return [dictionary[token] for token in tokens.tolist()]


def draw(source: Sequence[str], target: Sequence[str], attention: Tensor, output: Path) -> None:
    """Source tokens from left to right, target tokens downwards, and the darker a cell the stronger the attention."""
    figure = new_figure(1 + 0.35 * len(source), 1 + 0.35 * len(target))
    axes = figure.add_subplot()
    axes.imshow(attention.T.float().cpu().numpy(), cmap="Greys", vmin=0)
    axes.xaxis.tick_top()
    axes.set_xticks(range(len(source)), source, rotation=90, parse_math=False)
    axes.set_yticks(range(len(target)), target, parse_math=False)
    figure.savefig(output, dpi=150, bbox_inches="tight")
