"""Translate one sentence, and record what each decoder layer attends to."""

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

from fairseq_plugins.cli.files import blaming
from fairseq_plugins.cli.own_data.parallel_text import Line, segmenter
from fairseq_plugins.common.model import IncrementalDecoder
from fairseq_plugins.common.subwords import bpe_symbol


def translate(
    path: Path, data: str, text: str, segment: Line | None, beam: int
) -> tuple[list[str], list[str], dict[str, Tensor]]:
    """Load a model and translate a sentence; see `search` for what it returns.

    Args:
        path: checkpoint.
        data: folder of the dictionaries.
        text: the sentence.
        segment: makes subwords of it; None for the codes beside the data, if there are any.
        beam: beam size.

    Raises:
        ValueError: the model cannot translate, or the sentence is empty or too long for it.
    """
    with blaming(path, "cannot translate"):
        load = checkpoint_utils.load_model_ensemble_and_task
        (model,), _, task = load([str(path)], arg_overrides={"data": data})
        if not isinstance(model, FairseqEncoderDecoderModel):
            raise ValueError(f"{path} holds a {type(model).__name__}, and no encoder-decoder")
        sentence = segmented(text, Path(data), task.source_dictionary) if segment is None else segment(text)
        return search(task, model, sentence, beam)


def segmented(sentence: str, data: Path, dictionary: Dictionary) -> str:
    """Return the sentence in subwords by the codes beside the data, if the model has subwords."""
    beside = data.absolute().parent / "code"
    if beside.is_file() and "@@" not in sentence and bpe_symbol(dictionary.symbols) == "subword_nmt":
        try:
            return segmenter(beside)(sentence)
        except ValueError as error:  # a file of that name, of whatever
            print(f"warning: {error}. The sentence is not segmented; see --bpe-codes.", file=sys.stderr)
    return sentence


def search(
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


def symbols(dictionary: Dictionary, tokens: Tensor) -> list[str]:
    """What the tokens look like in text, the end-of-sentence mark included."""
    return [dictionary[token] for token in tokens.tolist()]


def attention_by_layer(model: BaseFairseqModel, sample: dict[str, Any], target: Tensor) -> dict[int, Tensor]:
    """Decode a known translation of one sentence and see what its layers attend to.

    Args:
        model: an encoder-decoder in eval mode, which has not been prepared for inference.
        sample: a batch of the sentence alone, as fairseq's generators take it.
        target: the translation, (T,), its end included.

    Returns:
        for each layer that attends, numbered from 1, its attention (S, T), averaged over heads; empty where the model's
        kind of attention is not known.
    """
    found: dict[int, Tensor] = {}
    with ExitStack() as hooks, torch.no_grad():
        for number, module in _attending(model.decoder):

            def keep(module: Any, inputs: tuple[Any, ...], output: Any, number: int = number) -> None:
                weights = module.weights(*inputs) if hasattr(module, "weights") else output[1]
                # Of fairseq's Transformer heads come first, and only from the layer that it reports.
                found[number] = weights.float().view(-1, *weights.shape[-2:]).mean(dim=0).t()

            hooks.callback(module.register_forward_hook(keep).remove)
        previous = target.roll(1).unsqueeze(0)  # its end comes first
        model(**sample["net_input"], prev_output_tokens=previous)
    return found


def _attending(decoder: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    """Yield the modules that attend to the source, with the number of their layer."""
    if isinstance(decoder, IncrementalDecoder):
        yield from decoder.attention_modules().items()
        return
    for name, module in decoder.named_modules():  # of fairseq's fconv and Transformer
        if isinstance(module, AttentionLayer) or (
            isinstance(module, MultiheadAttention) and module.encoder_decoder_attention
        ):
            number = re.search(r"\d+", name)
            yield (int(number[0]) + 1 if number else 1), module
