"""Training in ``own-data``: options of fairseq-train, an estimate of the time, and the training itself."""

from __future__ import annotations

import logging
import math
import re
import shlex
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from difflib import SequenceMatcher
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

import torch
from fairseq import checkpoint_utils, options, tasks, utils
from fairseq.dataclass.configs import OptimizationConfig
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.optim.lr_scheduler import LR_SCHEDULER_REGISTRY
from fairseq.trainer import Trainer

from fairseq_plugins.cli.arguments import USER_DIR, import_user_dir
from fairseq_plugins.cli.average import numbered_checkpoints, write_mean
from fairseq_plugins.cli.own_data.folder import BEST, METRICS, Base
from fairseq_plugins.cli.own_data.progress import Progress, counted, span
from fairseq_plugins.cli.parallel_text import read_text
from fairseq_plugins.cli.plot_loss import LOG
from fairseq_plugins.cli.processes import ALL_SENTENCES, NO_LONG_ONES, end_with_this_process, fairseq_lines
from fairseq_plugins.common.files import naming
from fairseq_plugins.common.model import TranslationModel
from fairseq_plugins.common.options import flag
from fairseq_plugins.cpu.packing import has_bfloat16

LITTLE = 1_000_000  # training on a text with fewer target tokens needs more dropout
LONGEST_WARMUP = 4000  # updates
PATIENCE = 6  # training stops after this number of validations (one per epoch) without improvement
AVERAGED = 5  # number of averaged checkpoints, one from each of the last epochs (Vaswani et al. 2017, section 6.1)
KEEP = "--keep-last-epochs"
SAVE_EVERY = 90  # seconds between checkpoints
SAVE = f"from fairseq_plugins.repairs.saving import save_every; save_every({SAVE_EVERY})"
TRIED = 3  # number of batches that are timed to estimate an epoch's time, after one batch as warm-up
# Each logging option needs one of its packages.  Without a package, fairseq only logs a message and ignores the option.
PACKAGES = {
    "tensorboard_logdir": ("tensorboard", "tensorboardX"),
    "wandb_project": ("wandb",),
    "aim_repo": ("aim",),
    "azureml_logging": ("azureml",),
}


class Training:
    """One training, with checkpoints in ``save``.

    ``wishes`` contains the options of --train, and ``validation`` the options for validation by BLEU or chrF.
    """

    def __init__(
        self,
        arch: str,
        save: Path,
        wishes: Sequence[str],
        user_dir: Path = USER_DIR,
        base: Base | None = None,
        fp32: bool = False,
        validation: Sequence[str] = (),
    ) -> None:
        self.model = model_of(arch, user_dir)
        self.save, self.log, self.adapts, self.fp32 = save, save / LOG, base is not None, fp32
        self.translates = bool(validation)
        self.user_dir = ["--user-dir", str(user_dir)]
        self.own = [*self.user_dir, "--arch", arch, "--save-dir", str(save)]
        self.own += [*ALL_SENTENCES, *NO_LONG_ONES]
        if base is not None:
            self.own += ["--finetune-from-model", str(base.checkpoint), *base.wishes]
        self.own += validation
        for name in (word.partition("=")[0] for word in wishes if validation):
            if name in ("--task", "--best-checkpoint-metric"):
                raise ValueError(f"--train: {name} is not allowed with --metric, which sets {name}; remove one of them")
        self.wishes = [*wishes, "--log-format", "json"]  # own-data and plot-loss parse JSON logs
        found = vars(parse(["DATA_BIN", *self.own, *self.settings(1, 1), *wishes]))
        for name, packages in PACKAGES.items():
            if found.get(name) and not any(map(find_spec, packages)):
                raise ValueError(f"--train: {flag(name)} needs the package {packages[0]}: pip install {packages[0]}")
        if fp32 and (other := next((name for name in ("amp", "bf16", "fp16") if found[name]), None)):
            raise ValueError(f"--fp32: --train chooses another precision, --{other}; remove one of them")
        needed: dict[str, Any] = {"arch": arch, "user_dir": str(user_dir), "save_dir": str(save)}
        needed |= {"no_save": False, "disable_validation": False, "checkpoint_suffix": ""}
        needed |= {"source_lang": None, "target_lang": None}
        for name, value in needed.items():
            if found.get(name, value) != value:
                instead = "give it to own-data itself" if name in ("arch", "user_dir") else "remove it"
                raise ValueError(
                    f"--train: {flag(name)} is not allowed, because own-data needs {save / BEST}; {instead}"
                )
        # fairseq's default --lr suits no schedule, so --lr must be given with --lr-scheduler.  Schedules of this plugin
        # may compute their learning rates without --lr.
        needs_rate = getattr(LR_SCHEDULER_REGISTRY[found["lr_scheduler"]], "needs_rate", True)
        if needs_rate and found["lr"] == OptimizationConfig().lr:
            raise ValueError(f"--train: --lr-scheduler {found['lr_scheduler']} needs a learning rate; add --lr")

    def settings(self, pairs: int, tokens: int) -> list[str]:
        """Return the options of `training_settings` that the user's criterion, optimizer and schedule accept.

        GPUs train in float16, and CPUs with bfloat16 instructions train in bfloat16, unless --fp32 or --train chooses
        another precision.  A resumed training keeps its precision.
        """
        chosen = training_settings(self.model, pairs, tokens, self.adapts, self.translates).split()
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
        """Return fairseq-train's precision options for a new or resumed training."""
        newest_first = sorted(self.save.glob("checkpoint*.pt"), key=lambda path: path.stat().st_mtime, reverse=True)
        for checkpoint in newest_first:
            with suppress(OSError):  # skip a damaged checkpoint, as fairseq-train does when it resumes
                common = checkpoint_utils.load_checkpoint_to_cpu(str(checkpoint))["cfg"]["common"]
                found = [f"--{name}" for name in ("fp16", "bf16") if common[name]]
                if self.fp32 and found:
                    raise ValueError(
                        f"--fp32: {self.save} was trained with {found[0]}; omit --fp32 or choose another folder"
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
            training_part: target side of the training text, as subwords.
            languages: --source-lang and --target-lang, because fairseq-train cannot parse ``pt-BR`` in file names.
        """
        lengths = [line.count(" ") + 1 for line in read_text(training_part, "")]
        words = [str(binary), *self.own, *languages, *self.settings(len(lengths), sum(lengths)), *self.wishes]
        chosen = vars(parse(words))
        if chosen["fp16"] and (chosen["cpu"] or not torch.cuda.is_available()):
            raise ValueError(
                f"{self.save}: float16 needs a GPU, because fairseq crashes on a CPU when a gradient overflows; train "
                "on a GPU, or omit --fp16; a training begun in float16 needs another OUT"
            )
        best = self.model.usual_epochs(len(lengths), chosen["dropout"]) if "dropout" in chosen else math.inf
        progress = Progress(best + max(chosen["patience"], 0), chosen)
        ends = {"patience": "validation", "max_epoch": "epoch", "max_update": "update"}
        limits = {name: counted(chosen[name], noun) for name, noun in ends.items() if chosen[name] > 0}
        if "patience" in limits:
            limits["patience"] += " in a row without improvement"
        when = " or ".join(limits.values())
        precision = "bfloat16" if chosen["bf16"] else "half precision" if chosen["fp16"] or chosen["amp"] else "float32"
        stops = f"; it stops after {when}" if when else ""
        print(f"\nTraining on {len(lengths)} sentence pairs in {precision}{stops}.", file=sys.stderr)
        is_one_process = chosen["distributed_world_size"] == 1
        # On a GPU no estimate is needed, because the training itself soon reports its speed.
        if is_one_process and not self.log.exists() and not torch.cuda.is_available():
            epoch, validation = seconds_of_epoch(words)
            epochs = min(progress.usual, progress.epochs)
            total = ""
            if epochs < math.inf:
                usual = "the usual " if epochs == progress.usual else ""
                total = f", about {span(epochs * epoch)} for {usual}{counted(round(epochs), 'epoch')}"
            # An untrained model needs more time to translate than a trained model.
            part = f" (validation: at most {span(validation)})" if chosen.get("eval_bleu") else ""
            print(f"Estimate for this CPU: about {span(epoch)} per epoch{part}{total}.", file=sys.stderr)
        print(
            f"You can stop at any time: the same command resumes, and repeats at most {SAVE_EVERY} s of work.\n"
            f"fairseq's log is {self.log}.",
            file=sys.stderr,
        )
        self.save.mkdir(exist_ok=True)
        lines = fairseq_lines("train", *words, before=f"{end_with_this_process()}\n{SAVE}")
        # With line buffering, the log has only complete lines even if the training is killed.
        with naming(self.log), closing(lines), self.log.open("a", encoding="utf-8", buffering=1) as log:
            log.write(f"$ {shlex.join(['fairseq-train', *words])}\n")  # the model card quotes this line
            for line in lines:
                log.write(line)
                progress.see(line)
            if not (self.save / BEST).exists():
                raise ValueError(
                    f"--train: the training ended without {self.save / BEST}; use options that validate and save at "
                    "least once"
                )
            self.average(binary, chosen, log)

    def average(self, binary: Path, chosen: dict[str, Any], log: TextIO) -> None:
        """Average the checkpoints of the last epochs; replace the best checkpoint if the average validates better.

        At the end of own-data's schedules, the learning rate is still so high that epochs differ in quality by chance.
        Their average differs less.  The averaged checkpoints are removed, unless --train asks to keep them.
        """
        epochs, best = numbered_checkpoints(self.save), self.save / BEST
        if len(last := epochs[-AVERAGED:]) > 1:
            mean = self.save / "checkpoint_average.pt"
            write_mean(last, mean)
            of_mean, of_best = (self.validated(path, binary, chosen) for path in (mean, best))
            metric = METRICS.get(chosen["best_checkpoint_metric"], chosen["best_checkpoint_metric"])
            told = (
                f"Validation {metric}: {of_best:g} in the best epoch, {of_mean:g} for the average of {len(last)} epochs"
            )
            if of_mean > of_best if chosen["maximize_best_checkpoint_metric"] else of_mean < of_best:
                mean.replace(best)
                told += f"; {BEST} is the average"
            mean.unlink(missing_ok=True)
            log.write(f"{told}.\n")
            print(f"\n{told}.", file=sys.stderr)
        if not any(word.partition("=")[0] == KEEP for word in self.wishes):
            for path in epochs:
                path.unlink()

    def validated(self, checkpoint: Path, binary: Path, chosen: dict[str, Any]) -> float:
        """Return the validation metric of a checkpoint."""
        part, batch = chosen["valid_subset"].split(",")[0], chosen["max_tokens_valid"] or chosen["max_tokens"]
        words = [binary, *self.user_dir, "--task", chosen["task"], "--path", checkpoint, "--valid-subset", part]
        words += ["--max-tokens", batch, *ALL_SENTENCES, *NO_LONG_ONES, *(["--cpu"] if chosen["cpu"] else [])]
        words += ["--distributed-world-size", 1, "--log-format", "json"]
        with closing(fairseq_lines("validate", *words)) as lines:
            found = re.findall(rf'"{part}_{chosen["best_checkpoint_metric"]}": "([^"]+)"', "".join(lines))
        return float(found[-1])


def model_of(arch: str, user_dir: Path) -> type[TranslationModel]:
    """Return an architecture's model class; for another plugin's architecture, return `TranslationModel`."""
    import_user_dir(user_dir)
    if "fairseq_plugins.repairs" not in sys.modules:
        raise ValueError(f"--user-dir {user_dir} does not load this plugin: call fairseq_plugins.install() in it")
    model = ARCH_MODEL_REGISTRY.get(arch)
    if model is None:
        ours = [name for name, model in ARCH_MODEL_REGISTRY.items() if issubclass(model, TranslationModel)]
        ours.sort(key=lambda name: (-SequenceMatcher(None, arch, name).ratio(), name))
        raise ValueError(
            f"--arch {arch}: unknown architecture; choose one of {', '.join(ours)}, or give --user-dir for your own "
            "architecture"
        )
    return model if issubclass(model, TranslationModel) else TranslationModel


def parse(words: Sequence[str], **more: Any) -> Any:
    """Parse options of fairseq-train."""
    parser = options.get_training_parser()
    vars(parser)["error"] = _refuse
    try:
        return options.parse_args_and_arch(parser, [*words], **more)
    except FileNotFoundError as error:
        if error.errno is not None:  # fairseq's own FileNotFoundError has no errno
            raise
        raise ValueError(f"--train: --user-dir {error} is not a folder; give --user-dir to own-data itself") from error
    except SyntaxError as error:  # fairseq could not parse a Python list
        raise ValueError(f"--train: {error.msg}: {error.text}; write a Python list, such as '[1, 2]'") from error


def _refuse(message: str) -> None:
    raise ValueError(f"--train: {message}")


def seconds_of_epoch(words: Sequence[str]) -> tuple[float, float]:
    """Estimate the seconds of an epoch, and of the validation in an epoch, from a few batches on this CPU."""
    level = logging.root.manager.disable
    logging.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # hide deprecation warnings in fairseq
            return _seconds_of_epoch(convert_namespace_to_omegaconf(parse(words)))
    finally:
        logging.disable(level)


def _seconds_of_epoch(cfg: Any) -> tuple[float, float]:
    task = tasks.setup_task(cfg.task)
    trainer = Trainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))
    steps: dict[str, Callable[[Any], object]] = {
        "train": lambda sample: trainer.train_step([sample]),
        "valid": trainer.valid_step,
    }
    training, validation = (_seconds_of_part(part, step, cfg, task, trainer) for part, step in steps.items())
    return training + validation, validation


def _seconds_of_part(part: str, step: Callable[[Any], object], cfg: Any, task: Any, trainer: Trainer) -> float:
    task.load_dataset(part)
    data = task.dataset(part)
    batches = task.get_batch_iterator(
        data,
        max_tokens=cfg.dataset.max_tokens,
        max_sentences=cfg.dataset.batch_size,
        max_positions=utils.resolve_max_positions(task.max_positions(), trainer.model.max_positions()),
        ignore_invalid_inputs=True,
        seed=cfg.common.seed,
    ).frozen_batches
    if not len(batches):  # fairseq-train will report an error if there are no batches
        return 0.0
    took = []
    for place in range(TRIED + 1):
        sample = data.collater([data[number] for number in batches[place * len(batches) // (TRIED + 1)]])
        begun = time.monotonic()
        step(sample)
        took.append(time.monotonic() - begun)
    return statistics.mean(took[1:]) * len(batches)


def training_settings(
    model: type[TranslationModel], pairs: int, tokens: int, adapts: bool = False, translates: bool = False
) -> str:
    """Return options of fairseq-train for a number of sentence pairs and target tokens.

    If ``adapts`` is true, a trained model is adapted, and the warm-up takes `LONGEST_WARMUP` updates.  On little text,
    an adaptation ends before its warm-up does, so its learning rate stays low.  If a new model is validated by BLEU or
    chrF, the patience grows by the epochs of the warm-up.  Scores may fall during the warm-up, because the random words
    of an untrained model can score higher than the first translations of the same model.
    """
    max_tokens = 1500 if pairs < 100_000 else 4000
    epoch = tokens // max_tokens + 1  # updates per epoch
    usual = max(int(epoch * model.warmup_epochs), model.shortest_warmup)
    warmup = LONGEST_WARMUP if adapts else min(usual, LONGEST_WARMUP)
    dropout = 0.3 if tokens < LITTLE else 0.2 if pairs < 1_000_000 else 0.1
    settings = f"--max-tokens {max_tokens} --dropout {dropout} --clip-norm 1"
    settings += f" --label-smoothing 0.1 {model.training_options(warmup)}"
    patience = PATIENCE + (warmup // epoch if translates and not adapts else 0)
    settings += f" --patience {patience} {KEEP} {AVERAGED}"
    return f"{settings} --log-interval {min(max(epoch // 4, 1), 25)}"
