"""Translate one sentence, and record the attention of each decoder layer."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from fairseq.models import BaseFairseqModel, FairseqEncoderDecoderModel
from fairseq.models.fconv import AttentionLayer
from fairseq.modules import MultiheadAttention
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks import FairseqTask
from torch import Tensor, nn

from fairseq_plugins.cli.files import naming_file_in_errors
from fairseq_plugins.cli.own_data.parallel_text import Line, segmenter
from fairseq_plugins.common.model import IncrementalDecoder
from fairseq_plugins.common.text import bpe_symbol


def translate(
    path: Path, data: str, text: str, segment: Line | None, beam: int
) -> tuple[list[str], list[str], dict[str, Tensor]]:
    """Load a model and translate a sentence; return the results of `search`.

    Args:
        path: checkpoint.
        data: folder of the dictionaries.
        text: sentence.
        segment: function that splits the sentence into subwords; by default, it uses the file ``code`` beside the data,
            if that file exists.
        beam: beam size.

    Raises:
        ValueError: the model cannot translate, or the sentence is empty or too long.
    """
    with naming_file_in_errors(path, "cannot translate"):
        load = checkpoint_utils.load_model_ensemble_and_task
        (model,), _, task = load([str(path)], arg_overrides={"data": data})
        if not isinstance(model, FairseqEncoderDecoderModel):
            raise ValueError(
                f"{path}: expected an encoder-decoder, got a {type(model).__name__}; give a translation model"
            )
        sentence = segmented(text, Path(data), task.source_dictionary) if segment is None else segment(text)
        return search(task, model, sentence, beam)


def segmented(sentence: str, data: Path, dictionary: Dictionary) -> str:
    """Split a sentence into subwords by the file ``code`` beside the data, if the model uses such codes."""
    beside = data.absolute().parent / "code"
    if beside.is_file() and "@@" not in sentence and bpe_symbol(dictionary.symbols) == "subword_nmt":
        try:
            return segmenter(beside)(sentence)
        except ValueError as error:  # an unrelated file named code
            print(f"warning: {error}; the sentence is not split into subwords, give --bpe-codes", file=sys.stderr)
    return sentence


def search(
    task: FairseqTask, model: BaseFairseqModel, sentence: str, beam: int
) -> tuple[list[str], list[str], dict[str, Tensor]]:
    """Find the best translation of a sentence.

    Returns:
        source tokens, target tokens, and by layer name the attention, with a row per source token and a column per
            target token.  If the layers of the model are unknown, the attention that the model itself reports.
    """
    dictionary = task.source_dictionary
    tokens = dictionary.encode_line(sentence, add_if_not_exist=False).long()
    if unknown := [word for word in sentence.split() if dictionary.index(word) == dictionary.unk()]:
        print(
            f"warning: --input: words unknown to the model: {' '.join(unknown)}; tokenise and segment the sentence "
            "like the training text, see --bpe-codes",
            file=sys.stderr,
        )
    if len(tokens) < 2:  # only the end-of-sentence token
        raise ValueError("--input: the sentence is empty; give at least one word")
    longest = model.max_positions()[0]
    if len(tokens) > longest:
        raise ValueError(
            f"--input: the sentence has {len(tokens)} tokens, the model reads at most {longest}; shorten it"
        )
    dataset = task.build_dataset_for_inference([tokens], [len(tokens)])
    sample = dataset.collater([dataset[0]])
    # The model is not prepared for inference, because this would switch off its attention. fairseq's plain generator
    # does not prepare models.
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
    return symbols(task.source_dictionary, tokens), symbols(task.target_dictionary, best["tokens"]), layers


def symbols(dictionary: Dictionary, tokens: Tensor) -> list[str]:
    """Return the words of tokens, with the end-of-sentence token."""
    return [dictionary[token] for token in tokens.tolist()]


def attention_by_layer(model: BaseFairseqModel, sample: dict[str, Any], target: Tensor) -> dict[int, Tensor]:
    """Decode a given translation of one sentence and record the attention of the layers.

    Args:
        model: an encoder-decoder in eval mode, not prepared for inference.
        sample: a batch with only this sentence, in the form that fairseq's generators read.
        target: tokens of the translation with the end-of-sentence token, (T,).

    Returns:
        attention (S, T) of each layer that attends to the source, averaged over heads.  Keys are the layers' numbers,
            from 1. Empty if the layers of the model are unknown.
    """
    found: dict[int, Tensor] = {}
    with ExitStack() as hooks, torch.no_grad():
        for number, module in _attending(model.decoder):

            def keep(module: Any, inputs: tuple[Any, ...], output: Any, number: int = number) -> None:
                weights = module.weights(*inputs) if hasattr(module, "weights") else output[1]
                # fairseq's Transformer returns (heads, 1, T, S), and only for one layer.
                found[number] = weights.float().view(-1, *weights.shape[-2:]).mean(dim=0).t()

            hooks.callback(module.register_forward_hook(keep).remove)
        # The decoder's input starts with the end-of-sentence token, as fairseq expects.
        previous = target.roll(1).unsqueeze(0)
        model(**sample["net_input"], prev_output_tokens=previous)
    return found


def _attending(decoder: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    """Yield the modules that attend to the source, with the numbers of their layers."""
    if isinstance(decoder, IncrementalDecoder):
        yield from decoder.attention_modules().items()
        return
    for name, module in decoder.named_modules():  # names of the modules in fairseq's fconv and Transformer
        if isinstance(module, AttentionLayer) or (
            isinstance(module, MultiheadAttention) and module.encoder_decoder_attention
        ):
            number = re.search(r"\d+", name)
            yield (int(number[0]) + 1 if number else 1), module
