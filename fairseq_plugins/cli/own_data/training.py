"""How ``own-data`` trains: with options by the size of the text, and those of the user that win over them."""

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
from fairseq_plugins.cli.plots.loss import LOG
from fairseq_plugins.cli.processes import ALL_SENTENCES, NO_LONG_ONES, fairseq_lines
from fairseq_plugins.cli.user_dir import USER_DIR
from fairseq_plugins.common.files import naming
from fairseq_plugins.common.model import TranslationModel
from fairseq_plugins.common.options import flag

NOTHING_LEFT = "nothing is left to train"  # how fairseq-train says so, with repairs/resuming.py
LONGEST_WARMUP = 4000  # updates
PATIENCE = 5  # validations, of which there is one an epoch
SAVE_EVERY = 90  # seconds of work that a stop may lose
SAVE = f"from fairseq_plugins.repairs.saving import save_every; save_every({SAVE_EVERY})"
TRIED = 3  # updates that are timed before a training, after one to warm up


class Training:
    """One training.

    Args:
        arch: architecture.
        save: folder of its checkpoints.
        wishes: options of fairseq-train that win over those chosen here.
        user_dir: what registers the architecture.
        base: trained model to start from.

    Raises:
        ValueError: there is no such architecture or option, or translations could not be made with what would be saved.
    """

    def __init__(
        self,
        arch: str,
        save: Path,
        wishes: Sequence[str],
        user_dir: Path = USER_DIR,
        base: Base | None = None,
    ) -> None:
        fairseq_plugins.install()
        import_user_dir(user_dir)
        if user_dir != USER_DIR and not brings_this_plugin(user_dir):
            raise ValueError(
                f"--user-dir {user_dir} must call fairseq_plugins.install(): it replaces the plugin's own folder"
            )
        model = ARCH_MODEL_REGISTRY.get(arch)
        if model is None:
            raise unknown_architecture(arch)
        self.model = model if issubclass(model, TranslationModel) else TranslationModel
        self.best, self.last, self.log = save / "checkpoint_best.pt", save / "checkpoint_last.pt", save / LOG
        self.own = ["--user-dir", str(user_dir), "--arch", arch, "--save-dir", str(save)]
        self.own += [*ALL_SENTENCES, *NO_LONG_ONES]
        self.base = base
        if base is not None:
            self.own += ["--finetune-from-model", str(base.checkpoint), *without_ends(base.wishes)]
        self.wishes = [*wishes, "--log-format", "json"]  # what is told of the training, and its curve, come from there
        found = vars(parse(["DATA_BIN", *self.own, *self.settings(1, 1), *wishes]))
        refuse_missing_packages(found)
        needed: dict[str, Any] = {"arch": arch, "user_dir": str(user_dir), "save_dir": str(save)}
        needed |= {"no_save": False, "disable_validation": False, "checkpoint_suffix": ""}
        needed |= {"source_lang": None, "target_lang": None}
        for name, value in needed.items():
            if found.get(name, value) != value:
                option = flag(name)
                instead = f"; give {option} to own-data itself" if name in ("arch", "user_dir") else ""
                raise ValueError(
                    f"--train: translations are made with {self.best}, so {option} cannot be given there{instead}"
                )
        # fairseq's default of --lr suits no schedule, and a family's own may need none.
        needs_rate = getattr(LR_SCHEDULER_REGISTRY[found["lr_scheduler"]], "needs_rate", True)
        if needs_rate and found["lr"] == OptimizationConfig().lr:
            raise ValueError(f"--train: --lr-scheduler {found['lr_scheduler']} needs --lr")

    def settings(self, pairs: int, tokens: int) -> list[str]:
        """Return `training_settings` without options that the criterion, optimizer and schedule of --train lack.

        A GPU trains in float16 unless --train has another precision; a training that goes on keeps its own.
        """
        chosen = training_settings(self.model, pairs, tokens, adapts=self.base is not None).split()
        wished, unknown = parse(["DATA_BIN", *self.own, *chosen, *self.wishes], parse_known=True)
        if not (wished.amp or wished.bf16 or wished.fp16) and (precision := self.precision(on_gpu=not wished.cpu)):
            chosen.append(precision)
        kept, is_known = [], True
        for word in chosen:
            if word.startswith("--"):
                is_known = word not in unknown
            if is_known:
                kept.append(word)
        return kept

    def precision(self, on_gpu: bool) -> str | None:
        """Return fairseq-train's option for the precision of the training that is to go on, or of a new one."""
        for checkpoint in (self.last, self.best):
            with suppress(OSError):  # there is none, or it is damaged, and fairseq-train goes on with another
                common = checkpoint_utils.load_checkpoint_to_cpu(str(checkpoint))["cfg"]["common"]
                return next((f"--{name}" for name in ("fp16", "bf16") if common[name]), None)
        return "--fp16" if torch.cuda.is_available() and on_gpu else None

    def run(self, binary: Path, training_part: Path, languages: Sequence[str]) -> None:
        """Train, or go on.

        Args:
            binary: folder of the data.
            training_part: the target side of the text.
            languages: fairseq-train's options that tell them; by names of files it knows no ``pt-BR``.

        Raises:
            ValueError: fairseq-train fails, or ends without a model to translate with.
        """
        pairs, tokens = count(training_part)
        words = [str(binary), *self.own, *languages, *self.settings(pairs, tokens), *self.wishes]
        chosen = vars(parse(words))
        ends = {"patience": "validations in a row without improvement", "max_epoch": "epochs", "max_update": "updates"}
        when = " or ".join(f"{chosen[name]} {what}" for name, what in ends.items() if chosen[name] > 0)
        print(f"\nTraining on {pairs} sentence pairs{f'; it ends after {when}' if when else ''}.", file=sys.stderr)
        usual = self.model.usual_epochs(pairs)
        is_one_process = chosen["distributed_world_size"] == 1
        # A GPU tells the time by its first updates.
        if is_one_process and not self.log.exists() and not torch.cuda.is_available():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # fairseq uses its libraries in ways that they have come to warn of
                epoch = seconds_of_epoch(words)
            epochs = min(usual, chosen["max_epoch"] or math.inf)
            total = f", and about {span(epochs * epoch)} for the usual {epochs:.0f} epochs" if epochs < math.inf else ""
            print(f"On this CPU it takes about {span(epoch)} for an epoch{total}.", file=sys.stderr)
        print(
            f"Stop it whenever you like: the same call goes on and repeats {SAVE_EVERY} s of work at most. fairseq's "
            f"own messages are in {self.log}.",
            file=sys.stderr,
        )
        limits = chosen["patience"], chosen["max_epoch"], chosen["max_update"]
        metric = chosen["best_checkpoint_metric"], chosen["maximize_best_checkpoint_metric"]
        progress = TrainingProgress(usual, *limits, *metric)
        self.log.parent.mkdir(exist_ok=True)
        lines = fairseq_lines("train", *words, before=SAVE)
        # Line by line, so that a training that is killed leaves whole ones.
        with naming(self.log), closing(lines), self.log.open("a", encoding="utf-8", buffering=1) as log:
            log.write(f"$ {shlex.join(['fairseq-train', *words])}\n")  # for the model card
            for line in lines:
                log.write(line)
                progress.see(line)
                if NOTHING_LEFT in line:
                    print(line.rpartition(" | ")[2], end="", file=sys.stderr)
        if not self.best.exists():
            raise ValueError(f"training has ended without {self.best}: by --train, it has not validated or not saved")


def is_exportable(arch: str, user_dir: Path) -> bool:
    """Return whether the models of an architecture can leave fairseq."""
    fairseq_plugins.install()
    import_user_dir(user_dir)
    return "onnx_program" in vars(ARCH_MODEL_REGISTRY[arch])


def brings_this_plugin(user_dir: Path) -> bool:
    """Whether fairseq's commands have this plugin with it: they are processes of their own."""
    program = "import sys; from argparse import Namespace; from fairseq.utils import import_user_module as load\n"
    program += "load(Namespace(user_dir=sys.argv[1])); sys.exit('fairseq_plugins.repairs' not in sys.modules)"
    return not subprocess.run([sys.executable, "-c", program, user_dir], capture_output=True, check=False).returncode


def parse(words: Sequence[str], **more: Any) -> Any:
    """What fairseq-train takes its options for.

    Raises:
        ValueError: one is wrong.
    """
    parser = options.get_training_parser()
    vars(parser)["error"] = _refuse
    try:
        return options.parse_args_and_arch(parser, [*words], **more)
    except SyntaxError as error:  # of a list, which fairseq reads as Python's
        raise ValueError(f"--train: {error.msg}: {error.text}") from error


def _refuse(message: str) -> None:
    raise ValueError(f"--train: {message}")


def seconds_of_epoch(words: Sequence[str]) -> float:
    """Return the time of an epoch on this CPU, by some updates of a training that is thrown away."""
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
        if not len(batches):  # fairseq-train says why
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
    """Lines and words."""
    words = [line.count(" ") + 1 for line in parallel_text.read_text(path, "")]
    return len(words), sum(words)


def training_settings(model: type[TranslationModel], pairs: int, tokens: int, adapts: bool = False) -> str:
    """Return options of fairseq-train for so many sentence pairs and target tokens.

    A model that is adapted keeps a low rate: the warm-up is so long that little text does not get beyond it.
    """
    max_tokens = 1500 if pairs < 100_000 else 4000
    epoch = tokens // max_tokens + 1  # updates
    warmup = LONGEST_WARMUP if adapts else min(max(epoch // 4, model.shortest_warmup), LONGEST_WARMUP)
    settings = f"--max-tokens {max_tokens} --dropout {0.2 if pairs < 1_000_000 else 0.1} --clip-norm 1"
    settings += f" --label-smoothing 0.1 {model.training_options(warmup)}"
    settings += f" --patience {PATIENCE} --no-epoch-checkpoints"
    return f"{settings} --log-interval {min(max(epoch // 4, 1), 25)}"
