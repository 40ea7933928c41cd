"""Training in ``own-data``: options depend on the size of the text, and the user's options override them."""

from __future__ import annotations

import logging
import math
import shlex
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils, options, tasks, utils
from fairseq.dataclass.configs import OptimizationConfig
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.optim.lr_scheduler import LR_SCHEDULER_REGISTRY
from fairseq.trainer import Trainer

import fairseq_plugins
from fairseq_plugins.cli.arguments import import_user_dir
from fairseq_plugins.cli.own_data import parallel_text
from fairseq_plugins.cli.own_data.progress import TrainingProgress, span
from fairseq_plugins.cli.own_data.refusals import refuse_missing_packages, unknown_architecture
from fairseq_plugins.cli.own_data.trained import Base, without_ends
from fairseq_plugins.cli.plot_loss import LOG
from fairseq_plugins.cli.processes import ALL_SENTENCES, NO_LONG_ONES, fairseq_lines
from fairseq_plugins.cli.user_dir import USER_DIR
from fairseq_plugins.common.files import naming
from fairseq_plugins.common.model import TranslationModel
from fairseq_plugins.common.options import flag
from fairseq_plugins.cpu.packing import has_bfloat16

NOTHING_LEFT = "nothing is left to train"  # repairs/resuming.py logs this sentence
LONGEST_WARMUP = 4000  # updates
PATIENCE = 5  # number of validations, one per epoch, without improvement
SAVE_EVERY = 90  # seconds between checkpoints
SAVE = f"from fairseq_plugins.repairs.saving import save_every; save_every({SAVE_EVERY})"
TRIED = 3  # updates that are timed to estimate an epoch's time, after one update of warm-up


class Training:
    """One training.

    Args:
        arch: architecture.
        save: folder of its checkpoints.
        wishes: the user's options of fairseq-train, which override own-data's.
        user_dir: folder that registers the architecture.
        base: trained model to start from.
        fp32: train in float32.

    Raises:
        ValueError: the architecture or an option is unknown, or the checkpoint could not be used for translation.
    """

    def __init__(
        self,
        arch: str,
        save: Path,
        wishes: Sequence[str],
        user_dir: Path = USER_DIR,
        base: Base | None = None,
        fp32: bool = False,
    ) -> None:
        fairseq_plugins.install()
        import_user_dir(user_dir)
        if user_dir != USER_DIR and not brings_this_plugin(user_dir):
            raise ValueError(f"--user-dir {user_dir} does not load this plugin: call fairseq_plugins.install() in it")
        model = ARCH_MODEL_REGISTRY.get(arch)
        if model is None:
            raise unknown_architecture(arch)
        self.model = model if issubclass(model, TranslationModel) else TranslationModel
        self.best, self.last, self.log = save / "checkpoint_best.pt", save / "checkpoint_last.pt", save / LOG
        self.own = ["--user-dir", str(user_dir), "--arch", arch, "--save-dir", str(save)]
        self.own += [*ALL_SENTENCES, *NO_LONG_ONES]
        self.base, self.fp32 = base, fp32
        if base is not None:
            self.own += ["--finetune-from-model", str(base.checkpoint), *without_ends(base.wishes)]
        self.wishes = [*wishes, "--log-format", "json"]  # for progress messages and plot-loss
        found = vars(parse(["DATA_BIN", *self.own, *self.settings(1, 1), *wishes]))
        refuse_missing_packages(found)
        if fp32 and (other := next((name for name in ("amp", "bf16", "fp16") if found[name]), None)):
            raise ValueError(f"--fp32: --train chooses another precision, --{other}; remove one of them")
        needed: dict[str, Any] = {"arch": arch, "user_dir": str(user_dir), "save_dir": str(save)}
        needed |= {"no_save": False, "disable_validation": False, "checkpoint_suffix": ""}
        needed |= {"source_lang": None, "target_lang": None}
        for name, value in needed.items():
            if found.get(name, value) != value:
                option = flag(name)
                instead = "give it to own-data itself" if name in ("arch", "user_dir") else "remove it"
                raise ValueError(f"--train: {option} is not allowed, because own-data needs {self.best}; {instead}")
        # fairseq's default --lr suits no schedule, so --lr must be given with --lr-scheduler.  A family's own schedule
        # may compute its rates without --lr.
        needs_rate = getattr(LR_SCHEDULER_REGISTRY[found["lr_scheduler"]], "needs_rate", True)
        if needs_rate and found["lr"] == OptimizationConfig().lr:
            raise ValueError(f"--train: --lr-scheduler {found['lr_scheduler']} needs a rate; add --lr")

    def settings(self, pairs: int, tokens: int) -> list[str]:
        """Return `training_settings`, without options that the criterion, optimizer or schedule of --train lack.

        GPUs train in float16, and CPUs with instructions for it in bfloat16, unless --fp32 or --train chooses another
        precision.  A resumed training keeps its precision.
        """
        chosen = training_settings(self.model, pairs, tokens, adapts=self.base is not None).split()
        wished, unknown = parse(["DATA_BIN", *self.own, *chosen, *self.wishes], parse_known=True)
        if not (wished.amp or wished.bf16 or wished.fp16):
            chosen += self.precision(on_gpu=torch.cuda.is_available() and not wished.cpu)
        kept, is_known = [], True
        for word in chosen:
            if word.startswith("--"):
                is_known = word not in unknown
            if is_known:
                kept.append(word)
        return kept

    def precision(self, on_gpu: bool) -> list[str]:
        """Return fairseq-train's options for the precision, for a new or a resumed training.

        Raises:
            ValueError: --fp32 is given for a training in another precision.
        """
        older = sorted(self.last.parent.glob("checkpoint*.pt"), key=lambda path: path.stat().st_mtime, reverse=True)
        for checkpoint in (self.last, *older):
            # If the file is missing or damaged, fairseq-train resumes from another checkpoint.
            with suppress(OSError):
                common = checkpoint_utils.load_checkpoint_to_cpu(str(checkpoint))["cfg"]["common"]
                found = [f"--{name}" for name in ("fp16", "bf16") if common[name]]
                if self.fp32 and found:
                    raise ValueError(
                        f"--fp32: {checkpoint.parent} was trained with {found[0]}; omit --fp32 or choose another folder"
                    )
                return found
        if self.fp32:
            return []
        if on_gpu:
            return ["--fp16"]
        return ["--bf16"] if has_bfloat16() else []

    def run(self, binary: Path, training_part: Path, languages: Sequence[str]) -> None:
        """Train, or resume.

        Args:
            binary: folder of binary data.
        training_part: target side of the training text.
            languages: options for the languages; fairseq-train cannot read ``pt-BR`` from file names.

        Raises:
            ValueError: fairseq-train fails, or ends without a best checkpoint.
        """
        pairs, tokens = count(training_part)
        words = [str(binary), *self.own, *languages, *self.settings(pairs, tokens), *self.wishes]
        chosen = vars(parse(words))
        ends = {"patience": "validations in a row without improvement", "max_epoch": "epochs", "max_update": "updates"}
        when = " or ".join(f"{chosen[name]} {what}" for name, what in ends.items() if chosen[name] > 0)
        precision = "bfloat16" if chosen["bf16"] else "half precision" if chosen["fp16"] or chosen["amp"] else "float32"
        print(
            f"\nTraining on {pairs} sentence pairs in {precision}{f'; it stops after {when}' if when else ''}.",
            file=sys.stderr,
        )
        usual = self.model.usual_epochs(pairs)
        is_one_process = chosen["distributed_world_size"] == 1
        # On a GPU no estimate is needed: the training itself soon tells its speed.
        if is_one_process and not self.log.exists() and not torch.cuda.is_available():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # hide deprecation warnings in fairseq
                epoch = seconds_of_epoch(words)
            epochs = min(usual, chosen["max_epoch"] or math.inf)
            total = f", about {span(epochs * epoch)} for the usual {epochs:.0f} epochs" if epochs < math.inf else ""
            print(f"Estimate for this CPU: about {span(epoch)} per epoch{total}.", file=sys.stderr)
        print(
            f"You can stop at any time: the same command resumes, and repeats at most {SAVE_EVERY} s of work.\n"
            f"fairseq's log is {self.log}.",
            file=sys.stderr,
        )
        limits = chosen["patience"], chosen["max_epoch"], chosen["max_update"]
        metric = chosen["best_checkpoint_metric"], chosen["maximize_best_checkpoint_metric"]
        progress = TrainingProgress(usual, *limits, *metric)
        self.log.parent.mkdir(exist_ok=True)
        lines = fairseq_lines("train", *words, before=SAVE)
        # Line buffering makes a killed training leave complete lines.
        with naming(self.log), closing(lines), self.log.open("a", encoding="utf-8", buffering=1) as log:
            log.write(f"$ {shlex.join(['fairseq-train', *words])}\n")  # for the model card
            for line in lines:
                log.write(line)
                progress.see(line)
                if NOTHING_LEFT in line:
                    print(line.rpartition(" | ")[2], end="", file=sys.stderr)
        if not self.best.exists():
            raise ValueError(
                f"--train: the training ended without {self.best}; use options that validate and save at least once"
            )


def is_exportable(arch: str, user_dir: Path) -> bool:
    """Return whether models of an architecture can be exported."""
    fairseq_plugins.install()
    import_user_dir(user_dir)
    return "onnx_program" in vars(ARCH_MODEL_REGISTRY[arch])


def brings_this_plugin(user_dir: Path) -> bool:
    """Return whether a user directory loads this plugin; a separate process imports it, as fairseq's commands do."""
    program = "import sys; from argparse import Namespace; from fairseq.utils import import_user_module as load\n"
    program += "load(Namespace(user_dir=sys.argv[1])); sys.exit('fairseq_plugins.repairs' not in sys.modules)"
    return not subprocess.run([sys.executable, "-c", program, user_dir], capture_output=True, check=False).returncode


def parse(words: Sequence[str], **more: Any) -> Any:
    """Parse options of fairseq-train.

    Raises:
        ValueError: an option is wrong.
    """
    parser = options.get_training_parser()
    vars(parser)["error"] = _refuse
    try:
        return options.parse_args_and_arch(parser, [*words], **more)
    except SyntaxError as error:  # in a Python list
        raise ValueError(f"--train: {error.msg}: {error.text}; write a Python list, such as '[1, 2]'") from error


def _refuse(message: str) -> None:
    raise ValueError(f"--train: {message}")


def seconds_of_epoch(words: Sequence[str]) -> float:
    """Estimate the time of one epoch on this CPU; a temporary training makes a few updates."""
    level = logging.root.manager.disable
    logging.disable()
    try:
        cfg = convert_namespace_to_omegaconf(parse(words))
        task = tasks.setup_task(cfg.task)
        task.load_dataset("train")
        trainer = Trainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))
        batches = task.get_batch_iterator(
            task.dataset("train"),
            max_tokens=cfg.dataset.max_tokens,
            max_sentences=cfg.dataset.batch_size,
            max_positions=utils.resolve_max_positions(task.max_positions(), trainer.model.max_positions()),
            ignore_invalid_inputs=True,
            seed=cfg.common.seed,
        ).frozen_batches
        if not len(batches):  # fairseq-train will report the error
            return 0.0
        took = []
        for place in range(TRIED + 1):
            batch = batches[place * len(batches) // (TRIED + 1)]
            sample = task.dataset("train").collater([task.dataset("train")[number] for number in batch])
            begun = time.monotonic()
            trainer.train_step([sample])
            took.append(time.monotonic() - begun)
    finally:
        logging.disable(level)
    return statistics.mean(took[1:]) * len(batches)


def count(path: Path) -> tuple[int, int]:
    """Return the numbers of lines and words."""
    words = [line.count(" ") + 1 for line in parallel_text.read_text(path, "")]
    return len(words), sum(words)


def training_settings(model: type[TranslationModel], pairs: int, tokens: int, adapts: bool = False) -> str:
    """Return options of fairseq-train for a number of sentence pairs and target tokens.

    An adaptation keeps the learning rate low, because its warm-up does not end before a training on little text does.
    """
    max_tokens = 1500 if pairs < 100_000 else 4000
    epoch = tokens // max_tokens + 1  # updates per epoch
    warmup = LONGEST_WARMUP if adapts else min(max(epoch // 4, model.shortest_warmup), LONGEST_WARMUP)
    settings = f"--max-tokens {max_tokens} --dropout {0.2 if pairs < 1_000_000 else 0.1} --clip-norm 1"
    settings += f" --label-smoothing 0.1 {model.training_options(warmup)}"
    settings += f" --patience {PATIENCE} --no-epoch-checkpoints"
    return f"{settings} --log-interval {min(max(epoch // 4, 1), 25)}"
