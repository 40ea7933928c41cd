"""How ``own-data`` trains: with options by the size of the text, and those of the user that win over them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from fairseq import options
from fairseq.models import ARCH_MODEL_NAME_REGISTRY

import fairseq_plugins.registration  # noqa: F401  (its architectures)
from fairseq_plugins.tools import parallel_text
from fairseq_plugins.tools.fairseq_command import ALL_SENTENCES, fairseq
from fairseq_plugins.tools.user_dir import USER_DIR

__all__ = ["Training"]

PATIENCE = 5  # epochs


class Training:
    """One training.

    Args:
        arch: architecture.
        save: folder of its checkpoints.
        wishes: options of fairseq-train that win over those chosen here.

    Raises:
        ValueError: there is no such architecture or option, or translations could not be made with what would be saved.
    """

    def __init__(self, arch: str, save: Path, wishes: Sequence[str]) -> None:
        family = ARCH_MODEL_NAME_REGISTRY.get(arch)
        if family is None:
            raise ValueError(f"--arch {arch}: there is no such architecture")
        self.family, self.wishes, self.best = family, wishes, save / "checkpoint_best.pt"
        self.own = ["--user-dir", str(USER_DIR), "--arch", arch, "--save-dir", str(save), *ALL_SENTENCES]
        parser = options.get_training_parser()
        vars(parser)["error"] = _refuse
        words = ["DATA_BIN", *self.own, *training_settings(family, 1, 1).split(), *wishes]
        found = vars(options.parse_args_and_arch(parser, words))
        needed = {"arch": arch, "save_dir": str(save), "no_save": False, "disable_validation": False}
        for name, value in {**needed, "checkpoint_suffix": ""}.items():
            if found[name] != value:
                option = f"--{name.replace('_', '-')}"
                raise ValueError(f"--train: translations are made with {self.best}, so {option} cannot be given there")

    def run(self, binary: Path, training_part: Path) -> None:
        """Train, or go on.

        Args:
            binary: folder of the data.
            training_part: the target side of the text.

        Raises:
            ValueError: fairseq-train fails, or ends without a model to translate with.
        """
        pairs, tokens = count(training_part)
        settings = training_settings(self.family, pairs, tokens)
        print(
            f"\nTraining on {pairs} sentence pairs, until validation has not improved for {PATIENCE} epochs. "
            "A training that is stopped goes on with the same call.",
            file=sys.stderr,
        )
        fairseq("train", binary, *self.own, *settings.split(), *self.wishes)
        if not self.best.exists():
            raise ValueError(f"training has ended without {self.best}: by --train, it has not validated or not saved")


def _refuse(message: str) -> None:
    raise ValueError(f"--train: {message}")


def count(path: Path) -> tuple[int, int]:
    """Lines and words."""
    words = [line.count(" ") + 1 for line in parallel_text.read_text(path, "")]
    return len(words), sum(words)


def training_settings(family: str, pairs: int, tokens: int) -> str:
    """Options of fairseq-train for so many sentence pairs and target tokens.

    The rate falls as 0.04 / sqrt(updates), as in examples/multi30k and, at its width of 512, with the Transformer.
    """
    max_tokens = 1500 if pairs < 100_000 else 4000
    epoch = tokens // max_tokens + 1  # updates
    convolutional = family in {"convs2s", "conv_encoder"}
    warmup = min(max(epoch // 4, 100 if convolutional else 400), 4000)
    settings = f"--max-tokens {max_tokens} --dropout {0.2 if pairs < 1_000_000 else 0.1} --clip-norm 1"
    settings += " --label-smoothing 0.1"
    if family == "weighted_transformer":
        settings += " --criterion weighted_label_smoothed_cross_entropy --optimizer simplex_adam"
        settings += f" --lr-scheduler weighted_inverse_sqrt --warmup-updates {warmup}"
        settings += f" --branch-lr-scale 0.1 --branch-warmup-updates {warmup // 10}"
    else:
        settings += " --criterion label_smoothed_cross_entropy --optimizer adam --adam-betas (0.9,0.98)"
        settings += f" --lr {0.04 / warmup**0.5:.2g} --lr-scheduler inverse_sqrt --warmup-updates {warmup}"
    if torch.cuda.is_available():
        settings += " --fp16 --fp16-no-flatten-grads" if family == "weighted_transformer" else " --fp16"
    if epoch > 5000:  # what is lost by a stop
        settings += " --save-interval-updates 5000 --keep-interval-updates 1"
    return f"{settings} --patience {PATIENCE} --no-epoch-checkpoints --log-format simple --log-interval 100"
