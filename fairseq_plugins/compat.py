"""The one place that touches fairseq, torch and numpy themselves.

Every patch has a probe: it asks for what it mends, never for a version, and leaves alone what is already right.
``fairseq_plugins`` imports this file, so ``--user-dir`` is enough to get all of them.

Checkpoints are read with torch's restricted unpickler, which builds nothing but what is on its list. Added to the list
is what fairseq's checkpoints hold, in a form that can neither run code nor corrupt memory, whatever the file says.
"""

import argparse
import contextlib
import copy
import functools
import io
import itertools
import pickle
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from fairseq import checkpoint_utils, options, utils
from fairseq.data import Dictionary
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from fairseq.logging.meters import AverageMeter, StopwatchMeter, TimeMeter
from fairseq.models import BaseFairseqModel
from fairseq.modules.transformer_layer import TransformerEncoderLayerBase
from fairseq.tasks import FairseqTask
from omegaconf import OmegaConf
from torch import Tensor

from fairseq_plugins.nn.literal import literal
from fairseq_plugins.unknown_words import keep_source_words, read_translations, replace_unknown_words


class PlainDtype:
    """Stands in for ``numpy.dtype`` in a file: numbers and booleans only.

    numpy believes a pickled dtype: one that hides an object field makes it follow the file's bytes as a pointer.
    """

    def __init__(self, code: str, align: bool = False, copy: bool = False) -> None:
        self.code = code

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.code = f"{state[1]}{self.code}"  # the byte order; the rest of the state describes structures and objects

    def resolve(self) -> "np.dtype[Any]":
        dtype = np.dtype(self.code)
        if dtype.kind not in "biufc":
            raise pickle.UnpicklingError(f"it holds a numpy array of {dtype}, and only numbers and booleans are read")
        return dtype


class PlainArray(np.ndarray):
    """Stands in for ``numpy.ndarray`` in a file: numpy's own, but shape and bytes are checked before they are used."""

    def __new__(cls, *_from_file: object) -> "PlainArray":
        return super().__new__(cls, 0)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, data = state
        array = np.frombuffer(data, dtype.resolve()).reshape(shape, order="F" if fortran else "C")
        super().__setstate__(array.__reduce__()[2])  # type: ignore[arg-type]

    def __reduce__(self) -> Any:
        return self.view(np.ndarray).__reduce__()  # what was read is written as numpy's own again


def plain_scalar(dtype: PlainDtype, data: bytes) -> Any:
    """Stands in for ``numpy.core.multiarray.scalar`` in a file."""
    return np.frombuffer(data, dtype.resolve())[0]


OLD_METERS = (AverageMeter, StopwatchMeter, TimeMeter)
SAFE_GLOBALS: list[Any] = [
    argparse.Namespace,  # a model's options
    *OLD_METERS,  # fairseq before 0.10 saved its meters as objects, under another name
    *((meter, f"fairseq.meters.{meter.__name__}") for meter in OLD_METERS),
    distributed_utils._TensorPlaceholder,  # a distributed resume sends the state without its tensors first
    (PlainDtype, "numpy.dtype"),  # sums in the meters, as those of --eval-bleu
    (PlainArray, "numpy.ndarray"),
    *((PlainArray, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    *((plain_scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
]


def refuses_foreign_classes(load: Callable[[str], Any]) -> bool:
    """Probe: whether ``load`` refuses a file with something that nobody has called safe."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/probe.pt"
        torch.save(print, path)
        try:
            load(path)
        except pickle.UnpicklingError:
            return True
        except TypeError:  # the file has been read, and turned out to be no checkpoint
            pass
    return False


def load_checkpoints_safely() -> None:
    """torch refuses every checkpoint of fairseq, and advises to switch its check off.

    Here what is safe is allowed, and of what is not the user is told that it was refused. Where the probe finds that
    files are not checked (an older torch, a fairseq that switches the check off), no checkpoint is loaded.
    """
    load = checkpoint_utils.load_checkpoint_to_cpu
    files_are_checked = refuses_foreign_classes(load)
    torch.serialization.add_safe_globals(SAFE_GLOBALS)

    @functools.wraps(load)
    def load_checkpoint_to_cpu(path: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if not files_are_checked:
            raise RuntimeError(
                f"{path} was not loaded: any code that it carries would be run. It takes torch 2.6 or later, a fairseq "
                "that does not pass weights_only=False, and TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD must not be set."
            )
        try:
            return load(path, *args, **kwargs)
        except pickle.UnpicklingError as error:
            reason = str(error.__context__ or error)  # what was wrong, before torch adds its advice
            if foreign := re.search(r"GLOBAL (\S+)", reason):
                reason = f"it holds {foreign[1]}, which no checkpoint of fairseq needs"
            raise pickle.UnpicklingError(f"{path} was refused: {reason}. Nothing that it carries was run.") from None

    checkpoint_utils.load_checkpoint_to_cpu = load_checkpoint_to_cpu


def torch_loads(value: object) -> bool:
    """Probe: whether ``torch.load`` takes what ``torch.save`` makes of ``value``."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    try:
        torch.load(file)
    except pickle.UnpicklingError:
        return False
    return True


def broadcast_plain_configuration() -> None:
    """In a distributed resume, rank 0 sends the configuration as omegaconf objects, which the other ranks refuse.

    It is sent as it stood in the file, as plain dictionaries.
    """
    if torch_loads(OmegaConf.create()):
        return
    broadcast = distributed_utils.broadcast_object

    @functools.wraps(broadcast)
    def broadcast_object(obj: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(obj, dict) and OmegaConf.is_config(obj.get("cfg")):
            obj = {**obj, "cfg": OmegaConf.to_container(obj["cfg"], enum_to_str=True)}
        return broadcast(obj, *args, **kwargs)

    distributed_utils.broadcast_object = broadcast_object


def evaluates(read: Callable[[str], Any]) -> bool:
    """Probe: whether ``read`` runs its argument as Python code."""
    try:
        return bool(read("abs(1)"))
    except ValueError:
        return False


def read_options_without_eval() -> None:
    """fairseq evaluates options as Python code: those of its models (``--encoder-layers``), which a checkpoint brings
    along, and of its optimizers (``--adam-betas``).

    The modules that may do so get an ``eval`` that reads literals.
    """
    if not evaluates(utils.eval_bool):
        return
    for name, module in list(sys.modules.items()):
        if name == "fairseq.utils" or name.startswith(("fairseq.models.", "fairseq.optim.")):
            vars(module)["eval"] = literal


def copies_into_the_old_file(copy: Callable[..., Any]) -> bool:
    """Probe: whether ``copy`` writes into the file that it replaces."""
    with tempfile.TemporaryDirectory() as folder:
        new, old = Path(folder, "new"), Path(folder, "old")
        new.touch()
        old.touch()
        before = old.stat().st_ino
        copy(str(new), str(old), overwrite=True)
        return old.stat().st_ino == before


def copy_checkpoints_atomically() -> None:
    """fairseq writes into ``checkpoint_last.pt``: killed meanwhile, it leaves neither the old one nor the new."""
    copy = PathManager.copy
    if not copies_into_the_old_file(copy):
        return

    @functools.wraps(copy)
    def copy_and_rename(src_path: str, dst_path: str, overwrite: bool = False) -> Any:
        if not (overwrite and PathManager.supports_rename(dst_path)):
            return copy(src_path, dst_path, overwrite)
        copied = copy(src_path, f"{dst_path}.tmp", overwrite)
        PathManager.rename(f"{dst_path}.tmp", dst_path)
        return copied

    PathManager.copy = staticmethod(copy_and_rename)


def finish_the_epoch_on_resume() -> None:
    """fairseq saves at the end of an epoch before it tells the learning-rate schedule how validation went.

    A resumed training would never tell it; a schedule that waits for a plateau would miss one.
    """
    load = checkpoint_utils.load_checkpoint
    if "val_loss" in load.__code__.co_consts:  # the probe: somebody looks at what the checkpoint says of it
        return

    @functools.wraps(load)
    def load_checkpoint(cfg: Any, trainer: Any, **passthrough: Any) -> Any:
        extra_state, epoch_itr = load(cfg, trainer, **passthrough)
        resumed = extra_state is not None and not (cfg.reset_lr_scheduler or cfg.reset_optimizer)
        # Fine-tuning starts with the first epoch: what validation said of the old model is not its business.
        if resumed and epoch_itr.epoch > 1 and epoch_itr.iterations_in_epoch == 0:
            trainer.lr_step(epoch_itr.epoch - 1, extra_state.get("val_loss"))
        return extra_state, epoch_itr

    checkpoint_utils.load_checkpoint = load_checkpoint


def use_no_fused_encoder_layer() -> None:
    """fairseq 0.12.2's transformers decode with torch's fused encoder layer, in a form which torch 2 no longer takes.

    ("Mask Type should be defined".) They take their ordinary way, as later ones do.
    """
    if "can_use_fastpath" in TransformerEncoderLayerBase.__init__.__code__.co_names:
        TransformerEncoderLayerBase.can_use_fastpath = property(lambda _: False, lambda _, __: None)


def restore_numpy_compat() -> None:
    """fairseq's data sets ask for ``np.compat.long`` (language models, ``--num-batch-buckets``), gone from NumPy 2."""
    if not hasattr(np, "compat"):
        vars(np)["compat"] = SimpleNamespace(long=int)


def takes_hard_alignments(replace: Callable[..., str]) -> bool:
    """Probe: whether ``replace`` understands the alignments that fairseq's generator makes."""
    try:
        return replace("<unk>", "word", [(0, 0)], {}, "<unk>") == "word"
    except TypeError:
        return False


def replace_unknown_words_by_attention() -> None:
    """fairseq's ``--replace-unk`` fails at an unknown word, and ``fairseq-interactive`` loses those of the source.

    Models are prepared to report attention, from which each unknown word gets its place in the source.
    """
    if takes_hard_alignments(utils.replace_unk):
        return
    prepare, build = BaseFairseqModel.prepare_for_inference_, FairseqTask.build_generator
    post_process = utils.post_process_prediction

    @functools.wraps(prepare)
    def prepare_for_inference_(self: Any, cfg: Any) -> None:
        align = getattr(cfg.generation, "print_alignment", None)
        if getattr(cfg.generation, "replace_unk", None) is not None and not align:
            cfg = copy.deepcopy(cfg)
            cfg.generation.print_alignment = "hard"
        prepare(self, cfg)

    @functools.wraps(build)
    def build_generator(self: Any, models: Any, args: Any, *more: Any, **others: Any) -> Any:
        generator = build(self, models, args, *more, **others)
        # --score-reference comes with a generator of another kind, which translates nothing.
        if getattr(args, "replace_unk", None) is not None and not getattr(args, "score_reference", False):
            keep_source_words(self, generator)
        return generator

    @functools.wraps(post_process)
    def post_process_prediction(
        hypo_tokens: Tensor,
        src_str: str,
        alignment: Any,
        align_dict: dict[str, str] | None,
        tgt_dict: Dictionary,
        remove_bpe: str | None = None,
        extra_symbols_to_ignore: Any = None,
    ) -> tuple[Tensor, str, Any]:
        tokens, text, alignment = post_process(
            hypo_tokens, src_str, alignment, None, tgt_dict, remove_bpe, extra_symbols_to_ignore
        )
        if align_dict is None:
            return tokens, text, alignment
        if remove_bpe is not None:
            raise ValueError("--replace-unk is for models of words: it does not go with --remove-bpe, --post-process")
        text = replace_unknown_words(tokens, text, alignment, src_str, align_dict, tgt_dict)
        # The dictionary learns no word from it, which a later sentence would take for one that the model knows.
        return tgt_dict.encode_line(text, add_if_not_exist=False), text, alignment

    BaseFairseqModel.prepare_for_inference_ = prepare_for_inference_
    FairseqTask.build_generator = build_generator
    utils.post_process_prediction = post_process_prediction
    utils.load_align_dict = read_translations


def answers_help_too_early(parse: Callable[..., Any]) -> bool:
    """Probe: whether ``parse`` shows its help before it has added the options of model, task and criterion."""
    times: list[object] = []
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        parse(argparse.ArgumentParser(), ["--help"], modify_parser=times.append)
    return len(times) < 2  # it lets the parser be modified before and after


def show_help_of_all_options() -> None:
    """``--arch convs2s --help`` shows fairseq's options and not the model's: the first of two passes answers it.

    It is kept from the first pass, and answered when the second begins.
    """
    parse = options.parse_args_and_arch
    if not answers_help_too_early(parse):
        return

    @functools.wraps(parse)
    def parse_args_and_arch(parser: Any, input_args: Any = None, *more: Any, **others: Any) -> Any:
        given = sys.argv[1:] if input_args is None else input_args
        if not {"-h", "--help"}.intersection(given):
            return parse(parser, input_args, *more, **others)
        passes = itertools.count(1)

        def answer(parser: argparse.ArgumentParser) -> None:
            if next(passes) == 2:
                parser.parse_args(["--help"])

        return parse(parser, [word for word in given if word not in ("-h", "--help")], modify_parser=answer)

    options.parse_args_and_arch = parse_args_and_arch


@functools.cache
def apply() -> None:
    load_checkpoints_safely()
    broadcast_plain_configuration()
    read_options_without_eval()
    copy_checkpoints_atomically()
    finish_the_epoch_on_resume()
    use_no_fused_encoder_layer()
    restore_numpy_compat()
    replace_unknown_words_by_attention()
    show_help_of_all_options()


apply()
