"""How ``own-data`` trains: with options by the size of the text, and those of the user that win over them."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from fairseq import options
from fairseq.dataclass.configs import OptimizationConfig
from fairseq.models import ARCH_MODEL_REGISTRY

import fairseq_plugins
from fairseq_plugins.cli.arguments import import_user_dir
from fairseq_plugins.cli.fairseq_command import ALL_SENTENCES, NO_LONG_ONES, fairseq_lines
from fairseq_plugins.cli.own_data import parallel_text
from fairseq_plugins.cli.own_data.progress import TrainingProgress
from fairseq_plugins.cli.own_data.refusals import refuse_missing_packages, unknown_architecture
from fairseq_plugins.cli.plots.loss import LOG
from fairseq_plugins.cli.user_dir import USER_DIR
from fairseq_plugins.common.model import TranslationModel
from fairseq_plugins.common.options import flag
from fairseq_plugins.common.whole_file import naming

NOTHING_LEFT = "nothing is left to train"  # how fairseq-train says so, with repairs/resuming.py
PATIENCE = 5  # validations, of which there is one an epoch


class Training:
    """One training.

    Args:
        arch: architecture.
        save: folder of its checkpoints.
        wishes: options of fairseq-train that win over those chosen here.
        user_dir: what registers the architecture.

    Raises:
        ValueError: there is no such architecture or option, or translations could not be made with what would be saved.
    """

    def __init__(self, arch: str, save: Path, wishes: Sequence[str], user_dir: Path = USER_DIR) -> None:
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
        self.best, self.log = save / "checkpoint_best.pt", save / LOG
        self.own = ["--user-dir", str(user_dir), "--arch", arch, "--save-dir", str(save)]
        self.own += [*ALL_SENTENCES, *NO_LONG_ONES]
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
        # The Weighted Transformer's own schedule has its rate from the sizes; fairseq's default is for no other one.
        if found["lr_scheduler"] != "weighted_inverse_sqrt" and found["lr"] == OptimizationConfig().lr:
            raise ValueError(f"--train: --lr-scheduler {found['lr_scheduler']} needs --lr")

    def settings(self, pairs: int, tokens: int) -> list[str]:
        """`training_settings`, without what the criterion, optimizer and schedule of --train do not know.

        On a GPU in half precision, unless --train has another.
        """
        chosen = training_settings(self.model, pairs, tokens).split()
        wished, unknown = parse(["DATA_BIN", *self.own, *chosen, *self.wishes], parse_known=True)
        if torch.cuda.is_available() and not (wished.amp or wished.bf16 or wished.cpu):
            chosen.append("--fp16")
        kept, is_known = [], True
        for word in chosen:
            if word.startswith("--"):
                is_known = word not in unknown
            if is_known:
                kept.append(word)
        return kept

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
        print(
            f"Stop it whenever you like: the same call goes on. What fairseq prints is in {self.log}.", file=sys.stderr
        )
        limits = chosen["patience"], chosen["max_epoch"], chosen["max_update"]
        metric = chosen["best_checkpoint_metric"], chosen["maximize_best_checkpoint_metric"]
        progress = TrainingProgress(self.model.usual_epochs(pairs), *limits, *metric)
        self.log.parent.mkdir(exist_ok=True)
        lines = fairseq_lines("train", *words)
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


def count(path: Path) -> tuple[int, int]:
    """Lines and words."""
    words = [line.count(" ") + 1 for line in parallel_text.read_text(path, "")]
    return len(words), sum(words)


def training_settings(model: type[TranslationModel], pairs: int, tokens: int) -> str:
    """Return options of fairseq-train for so many sentence pairs and target tokens."""
    max_tokens = 1500 if pairs < 100_000 else 4000
    epoch = tokens // max_tokens + 1  # updates
    warmup = min(max(epoch // 4, model.shortest_warmup), 4000)
    settings = f"--max-tokens {max_tokens} --dropout {0.2 if pairs < 1_000_000 else 0.1} --clip-norm 1"
    settings += f" --label-smoothing 0.1 {model.training_options(warmup)}"
    if epoch > 5000:  # a stop loses the updates since the last checkpoint
        settings += " --save-interval-updates 5000 --keep-interval-updates 1"
    settings += f" --patience {PATIENCE} --no-epoch-checkpoints"
    return f"{settings} --log-interval {min(max(epoch // 4, 1), 100)}"
